// Which request is lit up in a recording. Slots are given again and again, so it is the sequence that is followed, and its
// slot is looked up at every step.

const byId = (id) => document.getElementById(id);

/** Follows a sequence, or the first running choice of a request, through the steps of an `EnginePage`. */
export class Follow {
  /**
   * @param {import("./engine_page.js").EnginePage} page
   * @param {{seq: string | null, request: string | null}} wanted from the address
   * @param {() => void} onchange somebody else is followed now
   */
  constructor(page, { seq, request }, onchange) {
    this.page = page;
    this.seq = /^\d+$/.test(seq ?? "") ? Number(seq) : null;
    this.request = request;
    this.onchange = onchange;
    document.addEventListener("htmx:after:swap", () => this.update());
  }

  get isOn() {
    return this.seq !== null || Boolean(this.request);
  }

  /** Somebody lit up a slot, or put out the light (-1). */
  pick(slot) {
    const row = slot < 0 ? undefined : this.#rows().find((each) => Number(each.dataset.slot) === slot);
    const entry = this.page.view.batch.entries.find((each) => each.slot === slot);
    this.seq = slot < 0 ? null : (entry?.seqId ?? (row ? Number(row.dataset.seq) : null));
    this.request = row && Number(row.dataset.seq) === this.seq ? row.dataset.request : null;
    this.onchange();
    this.update();
  }

  /** The view has moved, or the list of requests has come. */
  update() {
    const { page } = this;
    if (this.isOn) {
      const slot = this.#slot();
      if (slot !== page.grid.selectedSlot) page.select(slot);
    }
    this.#write();
  }

  #slot() {
    const { view, grid } = this.page;
    const entry = this.seq === null ? undefined : view.batch.entries.find(({ seqId }) => seqId === this.seq);
    if (entry) return entry.slot;
    if (Number(byId("engine-step").value) !== view.step) return grid.selectedSlot; // the list is on its way
    const rows = this.#rows();
    const row = rows.find(({ dataset }) => Number(dataset.seq) === this.seq) ?? rows.find(({ dataset }) => dataset.request === this.request);
    if (!row) return -1;
    this.seq = Number(row.dataset.seq);
    this.request = row.dataset.request;
    return Number(row.dataset.slot);
  }

  #rows() {
    return [...byId("requests").querySelectorAll("tr[data-slot]")];
  }

  #write() {
    const note = byId("replay-follow");
    note.hidden = !this.isOn;
    if (!this.isOn) return;
    const name = this.request ? shortId(this.request) : `sequence ${this.seq}`;
    const text = `Following ${name}${this.page.grid.selectedSlot < 0 ? ", which holds no blocks at this step" : ""} · Esc ends it`;
    if (note.textContent !== text) note.textContent = text;
  }
}

/** The part of a request id by which people tell requests apart. */
export function shortId(requestId) {
  return (requestId.split("-").pop() || requestId).slice(0, 8);
}
