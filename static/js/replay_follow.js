// Which request is lit up in a recording. Slots are given again and again, so it is the sequence that is followed, and its
// slot is looked up at every step.

const byId = (id) => document.getElementById(id);

/** Follows a sequence, or the first running choice of a request, through the steps of an `EnginePage`. */
export class Follow {
  /**
   * @param {import("./engine_page.js").EnginePage} page
   * @param {{seq: string | null, request: string | null, unknown: string}} wanted from the address; `unknown`: the
   *   request, if the session has no such one
   * @param {() => void} onchange somebody else is followed now
   */
  constructor(page, { seq, request, unknown }, onchange) {
    this.page = page;
    this.seq = /^\d+$/.test(seq ?? "") ? Number(seq) : null;
    this.request = request;
    this.unknown = unknown;
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
    const isDark = this.page.grid.selectedSlot < 0;
    const parts =
      isDark && this.request && this.request === this.unknown
        ? [`This session has no request ${this.request}`]
        : ["Following ", this.request ? linkRequest(this.request) : `sequence ${this.seq}`, isDark ? ", which holds no blocks at this step" : ""];
    parts.push(" · Esc ends it");
    if (note.textContent !== parts.map((part) => part.textContent ?? part).join("")) note.replaceChildren(...parts);
  }
}

/** A link to the page of a request. */
export function linkRequest(requestId) {
  const link = document.createElement("a");
  link.href = `/r/${encodeURIComponent(requestId)}`;
  link.title = "Its page: life, texts, tokens";
  link.textContent = shortId(requestId);
  return link;
}

/** The part of a request id by which people tell requests apart. */
export function shortId(requestId) {
  return (requestId.split("-").pop() || requestId).slice(0, 8);
}
