// The list of requests: HTML that the server renders and htmx swaps. Here is only what the swaps cannot bring:
// which row is selected, and the click that selects it.

/** Wires the list. `onselect(slot)` is called with -1 to clear. */
export class RequestList {
  constructor(root, view, onselect) {
    this.root = root;
    this.view = view;
    this.onselect = onselect;
    this.selectedSlot = -1;
    root.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-slot]");
      if (row && !event.target.closest("a")) this.#pick(row);
      if (event.target.closest("#copy-curl")) copyText(root.querySelector("#curl-line"), event.target);
    });
    document.addEventListener("htmx:after:swap", () => this.refresh());
  }

  #pick(row) {
    const slot = Number(row.dataset.slot);
    if (this.#isCurrent(row)) this.onselect(slot === this.selectedSlot ? -1 : slot);
  }

  /** Whether the row's request still has its slot: the list may be a second old. */
  #isCurrent(row) {
    const entry = this.view.batch.entries.find(({ slot }) => slot === Number(row.dataset.slot));
    return entry === undefined || entry.seqId === Number(row.dataset.seq);
  }

  select(slot) {
    this.selectedSlot = slot;
    this.refresh();
  }

  refresh() {
    for (const row of this.root.querySelectorAll("tr[data-slot]")) {
      const isSelected = Number(row.dataset.slot) === this.selectedSlot;
      row.classList.toggle("is-selected", isSelected);
      row.querySelector(".pick").setAttribute("aria-pressed", String(isSelected));
    }
  }

  /** Short name of the request in a slot; "" when the list does not (or no longer) know it. */
  nameOf(slot) {
    const row = this.root.querySelector(`tr[data-slot="${slot}"]`);
    return row && this.#isCurrent(row) ? row.dataset.name : "";
  }
}

async function copyText(source, button) {
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source); // no clipboard here (plain http): leave it selected to be copied by hand
  }
}
