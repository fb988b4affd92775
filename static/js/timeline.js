// The timeline: what each step did, newest at the right. Steps, not seconds, run along the axis, so idle time takes
// no room; where the engine slept, a dashed line says for how long. Rows that never arrived are red.

import { formatCount, formatSpan } from "./format.js";
import { MarkCursor } from "./mark_cursor.js";
import { css } from "./palette.js";
import { StepBins } from "./step_bins.js";
import { TRACKS } from "./timeline_tracks.js";
import { MARK } from "./wire.js";

// [pixels per column, steps per column]
const LEVELS = [[12, 1], [8, 1], [4, 1], [2, 1], [1, 1], [1, 2], [1, 4], [1, 8], [1, 16], [1, 64]];
const DEFAULT_LEVEL = 2;
const NARROW_CSS = 600;
const TRACK_GAP_CSS = 7;
const SIGN_CSS = 9;
const MAX_ABORTS = 4096;

/** Paints the step ring of an `EngineView`. */
export class Timeline {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.ctx = canvas.getContext("2d", { alpha: false });
    this.theme = null;
    this.level = DEFAULT_LEVEL;
    this.bins = new StepBins(LEVELS[this.level][1]);
    this.hoverX = -1;
    this.aborts = [];
    this.cursor = new MarkCursor();
    this.resize();
  }

  resize() {
    this.ratio = devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.canvas;
    this.width = Math.max(1, Math.round(clientWidth * this.ratio));
    this.height = Math.max(1, Math.round(clientHeight * this.ratio));
    Object.assign(this.canvas, { width: this.width, height: this.height });
    this.isNarrow = clientWidth < NARROW_CSS;
    this.gutter = Math.round((this.isNarrow ? 106 : 148) * this.ratio);
  }

  /** Zoom by whole levels; positive is closer. Returns whether anything changed. */
  zoom(by) {
    const level = Math.min(LEVELS.length - 1, Math.max(0, this.level - by));
    if (level === this.level) return false;
    this.level = level;
    if (LEVELS[level][1] !== this.bins.width) this.bins = new StepBins(LEVELS[level][1]);
    return true;
  }

  /** What one column means, in words. */
  get scaleText() {
    const { width } = this.bins;
    return width === 1 ? "1 column = 1 step" : `1 column = ${width} steps, highest shown`;
  }

  /** Take what is new in the view. Call it with every message: a page that is not painted would miss marks. */
  update() {
    const { view } = this;
    if (view.epoch !== this.epoch) {
      this.epoch = view.epoch;
      this.bins.clear();
      this.aborts = [];
    }
    this.#takeAborts();
  }

  paint() {
    const { ctx, theme, view } = this;
    this.bins.update(view.steps, view.numBlocks);
    ctx.fillStyle = css(theme.panel);
    ctx.fillRect(0, 0, this.width, this.height);
    if (view.steps.length === 0) {
      this.#drawEmpty();
      return;
    }
    this.columnPx = Math.max(1, Math.round(LEVELS[this.level][0] * this.ratio));
    const fits = Math.ceil((this.width - this.gutter) / this.columnPx);
    this.endColumn = this.bins.end;
    this.firstColumn = Math.max(this.bins.first, this.endColumn - fits);
    const focus = this.#focusColumn();
    let top = 0;
    for (const track of TRACKS) {
      const height = Math.floor(this.height * track.share) - Math.round(TRACK_GAP_CSS * this.ratio);
      this.#drawFrame(top, height);
      const scale = track.draw(this, top, height);
      if (scale && !this.isNarrow) this.#drawScale(scale, top);
      this.#drawLabel(track.name, focus < 0 ? "" : track.text(this.bins.at(focus), this), top, height);
      top += Math.floor(this.height * track.share);
    }
    this.#drawBreaks();
    if (this.hoverX >= this.gutter && focus >= 0) this.#drawCursor(focus);
  }

  #drawEmpty() {
    const { ctx, theme, ratio } = this;
    ctx.font = `${12 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillStyle = css(theme.muted);
    ctx.fillText("No step yet. Each one will be a column here.", this.width / 2, this.height / 2, this.width);
  }

  #takeAborts() {
    for (const mark of this.cursor.take(this.view)) if (mark.kind === MARK.ABORT) this.aborts.push(mark.step);
    if (this.aborts.length > MAX_ABORTS) this.aborts.splice(0, this.aborts.length - MAX_ABORTS);
  }

  /** The column whose values the labels show: under the pointer, else the newest. */
  #focusColumn() {
    let column = this.endColumn - 1;
    if (this.hoverX >= this.gutter) column -= Math.floor((this.width - 1 - this.hoverX) / this.columnPx);
    return this.bins.has(column) ? column : -1;
  }

  /** Left edge of a column. */
  x(column) {
    return this.width - (this.endColumn - column) * this.columnPx;
  }

  /** Left edge and place in the bins of each column in view that has steps. */
  *columns() {
    for (let column = this.firstColumn; column < this.endColumn; column++) {
      if (this.bins.has(column)) yield [this.x(column), this.bins.at(column)];
    }
  }

  /** Highest of a quantity in view. */
  highest(valueAt) {
    let highest = 0;
    for (const [, at] of this.columns()) highest = Math.max(highest, valueAt(at));
    return highest;
  }

  get #barPx() {
    return this.columnPx >= 6 * this.ratio ? this.columnPx - Math.round(this.ratio) : this.columnPx;
  }

  /** Stacked bars: `parts` from the floor up, `max` at full height. */
  bars(top, height, max, parts) {
    if (max <= 0) return;
    const { ctx } = this;
    const barPx = this.#barPx;
    const floors = new Map();
    for (const { valueAt, color } of parts) {
      ctx.fillStyle = color;
      for (const [x, at] of this.columns()) {
        const value = valueAt(at);
        if (value === 0) continue;
        const floor = floors.get(x) ?? top + height;
        const bar = Math.max(1, Math.round((height * value) / max));
        ctx.fillRect(Math.max(x, this.gutter), floor - bar, barPx - Math.max(0, this.gutter - x), bar);
        floors.set(x, floor - bar);
      }
    }
  }

  /** A sign where columns are wide enough for one, a tick where they are not. */
  sign(sign, x, y, height) {
    const { ctx, ratio } = this;
    if (x < this.gutter) return;
    if (this.columnPx < SIGN_CSS * 0.8 * ratio) {
      ctx.fillRect(x, Math.round(y + height * 0.15), Math.max(this.#barPx, Math.round(ratio)), Math.round(height * 0.7));
      return;
    }
    ctx.font = `${SIGN_CSS * ratio}px "DejaVu Sans", sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillText(sign, x + this.columnPx / 2, y + height / 2);
  }

  #drawFrame(top, height) {
    const { ctx, theme } = this;
    ctx.fillStyle = css(theme.grid);
    ctx.fillRect(this.gutter, top, this.width - this.gutter, height);
    ctx.fillStyle = css(theme.line);
    ctx.fillRect(this.gutter, top + height - 1, this.width - this.gutter, 1);
  }

  #drawLabel(name, value, top, height) {
    const { ctx, theme, ratio } = this;
    const size = 11 * ratio;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.font = `${size}px system-ui, "DejaVu Sans", sans-serif`;
    ctx.fillStyle = css(theme.muted);
    ctx.fillText(name, 0, top + Math.min(height / 2, size));
    ctx.font = `${size}px ui-monospace, "DejaVu Sans Mono", monospace`;
    ctx.fillStyle = css(theme.text);
    if (height >= 2.2 * size) ctx.fillText(value, 0, top + size + 14 * ratio, this.gutter - 8 * ratio);
  }

  /** What the full height of a track stands for, as the tick of an axis. */
  #drawScale(text, top) {
    const { ctx, theme, ratio } = this;
    ctx.font = `${10 * ratio}px ui-monospace, "DejaVu Sans Mono", monospace`;
    ctx.textAlign = "right";
    ctx.textBaseline = "top";
    ctx.fillStyle = css(theme.muted);
    ctx.fillText(text, this.gutter - 6 * ratio, top);
  }

  /** A dashed line across the track. */
  dash(y, rgb) {
    const { ctx, ratio } = this;
    ctx.strokeStyle = css(rgb);
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(this.gutter, y + 0.5);
    ctx.lineTo(this.width, y + 0.5);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  /** Idle time and rows that never came. */
  #drawBreaks() {
    const { ctx, theme, bins, ratio } = this;
    ctx.font = `${10 * ratio}px ui-monospace, "DejaVu Sans Mono", monospace`;
    ctx.textBaseline = "top";
    ctx.textAlign = "right";
    let lastLabelX = -Infinity;
    for (const [x, at] of this.columns()) {
      if (bins.idleMs[at] === 0 || x < this.gutter) continue;
      ctx.fillStyle = css(theme.muted, 0.9);
      for (let y = 0; y < this.height; y += 6 * ratio) ctx.fillRect(x, y, Math.round(ratio), 3 * ratio);
      const label = `⋯ ${formatSpan(bins.idleMs[at])} idle`;
      const width = ctx.measureText(label).width + 8 * ratio;
      if (x - width < Math.max(lastLabelX, this.gutter)) continue;
      ctx.fillStyle = css(theme.grid, 0.85);
      ctx.fillRect(x - width, ratio, width, 13 * ratio);
      ctx.fillStyle = css(theme.text);
      ctx.fillText(label, x - 4 * ratio, 2 * ratio);
      lastLabelX = x;
    }
    ctx.fillStyle = css(theme.bad, 0.55);
    for (const { firstStep, nSteps } of this.view.gaps) {
      const from = Math.max(this.gutter, this.x(Math.floor(firstStep / bins.width)));
      const to = this.x(Math.floor((firstStep + nSteps - 1) / bins.width) + 1);
      if (to > from) ctx.fillRect(from, 0, to - from, this.height);
    }
  }

  #drawCursor(column) {
    const { ctx, theme } = this;
    ctx.strokeStyle = css(theme.accent);
    ctx.lineWidth = Math.max(1, Math.round(this.ratio));
    ctx.strokeRect(this.x(column) - 0.5, 0.5, Math.max(this.columnPx, 2), this.height - 1);
  }

  /** The step under the pointer (of several the one that is described); -1 when there is none. */
  get hoverStep() {
    const column = this.hoverX < this.gutter || this.columnPx === undefined ? -1 : this.#focusColumn();
    return column < 0 ? -1 : this.bins.step[this.bins.at(column)];
  }

  /** The first step with a preemption in the column under the pointer; -1 when there is none. */
  get hoverPreemption() {
    if (this.hoverStep < 0) return -1;
    const column = this.#focusColumn();
    if (this.bins.preemptions[this.bins.at(column)] === 0) return -1;
    const { steps } = this.view;
    const end = (column + 1) * this.bins.width;
    for (let i = steps.find(column * this.bins.width); i < steps.length && steps.get("step", i) < end; i++) {
      if (steps.get("preemptions", i) > 0) return steps.get("step", i);
    }
    return -1;
  }

  /** Words for the step under the pointer; empty when there is none. */
  describeHover() {
    if (this.hoverStep < 0) return "";
    const at = this.bins.at(this.#focusColumn());
    const hint = this.bins.preemptions[at] > 0 ? "click: why" : "";
    return [`step ${formatCount(this.bins.step[at])}`, ...TRACKS.map((track) => track.words(at, this)), hint].filter(Boolean).join(" · ");
  }
}
