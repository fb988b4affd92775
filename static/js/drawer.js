// The drawer with what the scheduler decided in a step: HTML that the server renders and htmx swaps. Here is only what the
// swaps cannot bring: opening, closing, and where the focus goes.

/** Newest step up to which a ring of rows has a preemption; -1: none. */
export function newestPreemption(steps) {
  for (let i = steps.length - 1; i >= 0; i--) if (steps.get("preemptions", i) > 0) return steps.get("step", i);
  return -1;
}

/** Usage: `open(step)`, `close()`. Links anywhere on the page that swap into `#drawer-body` open it too. */
export class Drawer {
  #opener = null;

  /** @param {HTMLElement} root `#drawer`, whose data-path is the address of decisions without the step */
  constructor(root) {
    this.root = root;
    this.body = root.querySelector("#drawer-body");
    root.querySelector("#drawer-close").addEventListener("click", () => this.close());
    document.addEventListener("click", (event) => this.#noteOpener(event.target.closest?.("[hx-target='#drawer-body']")));
    document.addEventListener("htmx:after:swap", ({ detail }) => {
      if (detail.ctx.target === this.body) this.#show();
    });
    for (const name of ["htmx:response:error", "htmx:error"]) {
      document.addEventListener(name, ({ detail }) => {
        if (detail.ctx?.target === this.body) this.#tell(detail.ctx.response?.status);
      });
    }
  }

  /** Fetch and show the decisions of a step. */
  open(step) {
    this.#noteOpener(document.activeElement);
    window.htmx.ajax("GET", `${this.root.dataset.path}/${step}`, { target: this.body, source: this.root, swap: "innerHTML" });
  }

  /** Close it; whether it was open. The focus goes back to where it came from, if that is still there. */
  close() {
    if (this.root.hidden) return false;
    this.root.hidden = true;
    this.body.replaceChildren();
    if (this.#opener?.isConnected) this.#opener.focus();
    this.#opener = null;
    return true;
  }

  #noteOpener(element) {
    if (element && !this.root.contains(element)) this.#opener = element;
  }

  #show() {
    this.root.hidden = false;
    this.root.scrollTop = 0;
    this.body.querySelector("#decisions-title")?.focus();
  }

  #tell(status) {
    const words = document.createElement("p");
    words.setAttribute("role", "alert");
    words.textContent = `The decisions of this step cannot be shown: ${status ? `error ${status}` : "the server does not answer"}.`;
    this.body.replaceChildren(words);
    this.#show();
  }
}
