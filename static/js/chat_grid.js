// The small block grid beside the chat: the live engine, with one request's blocks lit.

import { BlockGrid } from "./block_grid.js";
import { formatCount } from "./format.js";
import { PaintLoop } from "./paint_loop.js";
import { EngineView } from "./reducer.js";
import { EngineStream } from "./stream.js";

const CAPTION_MS = 200;
const FPS = 30;

/** Paints the engine into `panel`; `light(seqId, slot)` says whose blocks are lit. */
export class MiniGrid {
  #seqId = -1;
  #captionAt = -Infinity;
  #captionTimer = 0;

  /** @param {HTMLElement} panel @param {{onengine: (status: string) => void}} options told when the engine's status is new */
  constructor(panel, { onengine }) {
    this.panel = panel;
    this.canvas = panel.querySelector("canvas");
    this.caption = panel.querySelector("#mini-grid-caption");
    this.onengine = onengine;
    this.view = new EngineView({ ringCapacity: 1024 });
    this.grid = new BlockGrid(this.canvas, this.view);
    this.loop = new PaintLoop((now) => this.#paint(now), (fps) => this.stream.setFps(Math.min(FPS, fps)));
    this.stream = new EngineStream(this.view, {
      fps: FPS,
      onchange: (change) => this.#change(change),
      onstatus: (status) => this.#status(status),
    });
  }

  start() {
    const resizer = new ResizeObserver(() => {
      this.grid.resize();
      this.loop.request();
    });
    resizer.observe(this.canvas);
    document.addEventListener("visibilitychange", () => this.loop.request());
    this.stream.start();
  }

  setTheme(theme) {
    this.grid.setTheme(theme);
    if (theme.forced) this.grid.setMode("state"); // owner colours are not the system's colours
    this.loop.request();
  }

  /** Light up the blocks of a sequence that runs in `slot` (-1: it waits); no sequence (-1): all blocks. */
  light(seqId, slot) {
    this.#seqId = seqId;
    this.#select(slot);
  }

  #select(slot) {
    if (slot === this.grid.selectedSlot) return;
    this.grid.select(slot);
    this.loop.request();
  }

  #change({ changed, hello }) {
    if (hello) {
      this.grid.resize();
      this.onengine(this.view.status);
    }
    if (this.#seqId >= 0) {
      // The batch is newer than what the answer's stream said last.
      const entry = this.view.batch.entries.find(({ seqId }) => seqId === this.#seqId);
      if (entry) this.#select(entry.slot);
    }
    this.grid.update(changed);
    this.loop.request();
  }

  #status({ connected, attempt, refused }) {
    const isDown = !connected && (attempt > 0 || refused);
    this.panel.dataset.connection = connected ? "live" : isDown ? "down" : "connecting";
    this.#captionAt = -Infinity;
    this.loop.request();
  }

  #paint(now) {
    if (!this.grid.theme) return false;
    const isFading = this.grid.paint(now);
    this.stream.painted();
    if (now - this.#captionAt >= CAPTION_MS) this.#write(now);
    else this.#captionTimer ||= setTimeout(() => this.loop.request(), CAPTION_MS);
    return isFading;
  }

  #write(now) {
    this.#captionAt = now;
    clearTimeout(this.#captionTimer);
    this.#captionTimer = 0;
    const text = this.#describe();
    if (this.caption.textContent === text) return;
    this.caption.textContent = text;
    this.canvas.setAttribute("aria-label", `KV block grid: ${text}`);
  }

  #describe() {
    if (this.panel.dataset.connection !== "live") return this.panel.dataset.connection === "down" ? "disconnected" : "connecting";
    const { view } = this;
    if (view.numBlocks === 0) return view.status === "loading" ? "the model is loading" : view.status;
    let used = 0;
    for (const cell of view.cells) if ((cell & 15) > 1) used++;
    return `step ${formatCount(Math.max(0, view.step))}, ${Math.round((100 * used) / view.numBlocks)}% in use`;
  }
}
