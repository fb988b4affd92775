// One requestAnimationFrame request at a time; whatever is dirty is painted in it, and the pace is measured.

const SLOW_PAINT_MS = 12;
const VERY_SLOW_PAINT_MS = 25;
const SMOOTHING = 0.1;
const SETTLE_FRAMES = 30;

/** Calls `paint(now)` (which returns whether to go on) in the next frame after each `request`. */
export class PaintLoop {
  #requested = false;
  #paintMs = 0;
  #framesSinceChange = 0;

  /** `onpace(fps)` is told when painting turns out too slow, or fast enough again. */
  constructor(paint, onpace) {
    this.paint = paint;
    this.onpace = onpace;
    this.fps = 60;
  }

  request() {
    if (this.#requested || document.visibilityState === "hidden") return;
    this.#requested = true;
    requestAnimationFrame((now) => this.#frame(now));
  }

  #frame(now) {
    this.#requested = false;
    const start = performance.now();
    const goesOn = this.paint(now);
    this.#measure(performance.now() - start);
    if (goesOn) this.request();
  }

  #measure(ms) {
    this.#paintMs += (ms - this.#paintMs) * SMOOTHING;
    if (++this.#framesSinceChange < SETTLE_FRAMES) return;
    const fps = this.#paintMs > VERY_SLOW_PAINT_MS ? 15 : this.#paintMs > SLOW_PAINT_MS ? 30 : 60;
    if (fps === this.fps) return;
    this.fps = fps;
    this.#framesSinceChange = 0;
    this.onpace(fps);
  }
}
