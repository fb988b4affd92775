// The KV block grid: one pixel per block in an image, drawn enlarged; glyphs, marks and outlines on top.
// Painting costs the same whatever happened to the blocks, and a selection is only another colour table.

import { GlyphPainter, bodyPoint, drawGaps, drawRowLabels, glyphMetrics } from "./block_glyphs.js";
import { GridLayout } from "./grid_layout.js";
import { GridMarks } from "./grid_marks.js";
import { blockRgb, buildTable, css, isHeld } from "./palette.js";
import { NO_SLOT, cellSlot, cellState } from "./wire.js";

const GUTTER_MIN_CSS_WIDTH = 480;
const GUTTER_DIGIT_CSS = 6.3;
const GUTTER_PAD_CSS = 12;

/** Paints an `EngineView`. `layout` may be zoomed and panned from outside; call `paint` afterwards. */
export class BlockGrid {
  /** @param {HTMLCanvasElement} canvas @param {import("./reducer.js").EngineView} view */
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.layout = new GridLayout();
    this.marks = new GridMarks();
    this.mode = "request";
    this.selectedSlot = -1;
    this.onlyState = -1;
    this.cursor = -1;
    this.hover = -1;
    this.theme = null;
    this.ctx = canvas.getContext("2d", { alpha: false });
    this.image = document.createElement("canvas");
    this.imageCtx = this.image.getContext("2d");
    this.glyphs = new GlyphPainter();
    this.isStale = true;
  }

  setTheme(theme) {
    this.theme = theme;
    this.refreshColors();
  }

  /** @param {"request" | "state"} mode */
  setMode(mode) {
    this.mode = mode;
    this.refreshColors();
  }

  /** Light up one slot's blocks (-1: all). */
  select(slot) {
    this.selectedSlot = slot;
    this.refreshColors();
  }

  /** Light up the blocks of one state (-1: all). */
  showOnly(state) {
    this.onlyState = state;
    this.refreshColors();
  }

  /** The pool has another size, or the canvas has. */
  resize() {
    const ratio = devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.canvas;
    const width = Math.max(1, Math.round(clientWidth * ratio));
    const height = Math.max(1, Math.round(clientHeight * ratio));
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const digits = String(Math.max(0, this.view.numBlocks - 1)).length;
    const gutter = clientWidth < GUTTER_MIN_CSS_WIDTH ? 0 : Math.round((digits * GUTTER_DIGIT_CSS + GUTTER_PAD_CSS) * ratio);
    this.layout.resize(width, height, ratio, gutter);
    if (this.layout.numBlocks !== this.view.numBlocks) {
      this.layout.setBlocks(this.view.numBlocks);
      this.marks.clear();
      this.cursor = this.hover = -1;
    }
    this.#makeImage();
  }

  #makeImage() {
    const { cols, rows } = this.layout;
    this.image.width = Math.max(1, cols);
    this.image.height = Math.max(1, rows);
    this.pixels = this.imageCtx.createImageData(this.image.width, this.image.height);
    this.words = new Uint32Array(this.pixels.data.buffer);
    this.refreshColors();
  }

  refreshColors() {
    const numSlots = this.view.hello?.config?.max_num_seqs ?? 1;
    if (this.theme) {
      const { theme, mode, selectedSlot, onlyState } = this;
      this.colors = buildTable({ theme, mode, numSlots, selectedSlot, onlyState });
    }
    this.isStale = true;
  }

  /** Take changed cells into the image: `ids` of a message, or null for all of them. */
  update(ids) {
    this.marks.take(this.view);
    if (ids === null || this.isStale) this.isStale = true;
    else for (const id of ids) this.#colorBlock(id);
    this.isUploaded = false;
  }

  #colorBlock(id) {
    const cell = this.view.cells[id];
    const { table, shift, mask } = this.colors;
    this.words[id] = table[(cellState(cell) << shift) | (cellSlot(cell) & mask)];
  }

  /** Draw everything. Returns whether something still fades and needs another frame. */
  paint(now) {
    const { ctx, layout, theme } = this;
    ctx.fillStyle = css(theme.grid);
    ctx.fillRect(0, 0, layout.width, layout.height);
    if (this.view.numBlocks === 0) return false;
    this.#upload();
    const metrics = glyphMetrics(layout);
    ctx.imageSmoothingEnabled = false;
    const left = layout.gutter + layout.panX;
    ctx.drawImage(this.image, left, layout.panY, layout.cols * metrics.cell, layout.rows * metrics.cell);
    this.#clearAfterLast(metrics.cell);
    drawGaps(ctx, layout, metrics, theme);
    const isDim = (state, slot) => this.#isDim(state, slot);
    this.glyphs.draw(ctx, layout, metrics, { view: this.view, theme, mode: this.mode, isDim });
    this.marks.draw(ctx, layout, metrics, theme, now);
    this.#outline(this.hover, css(theme.text, 0.8), metrics);
    if (document.activeElement === this.canvas) this.#outline(this.cursor, css(theme.accent), metrics);
    drawRowLabels(ctx, layout, metrics, theme);
    return !this.marks.isEmpty;
  }

  #upload() {
    if (this.isStale) {
      for (let id = 0; id < this.view.numBlocks; id++) this.#colorBlock(id);
      this.isStale = false;
      this.isUploaded = false;
    }
    if (!this.isUploaded) this.imageCtx.putImageData(this.pixels, 0, 0);
    this.isUploaded = true;
  }

  /** The last row may be short; what lies behind it is no block. */
  #clearAfterLast(cell) {
    const { layout } = this;
    const used = layout.numBlocks % layout.cols;
    if (used === 0) return;
    this.ctx.fillStyle = css(this.theme.grid);
    const x = layout.gutter + layout.panX + used * cell;
    this.ctx.fillRect(x, layout.panY + (layout.rows - 1) * cell, (layout.cols - used) * cell, cell);
  }

  #isDim(state, slot) {
    if (this.onlyState >= 0 && state !== this.onlyState) return true;
    return this.selectedSlot >= 0 && !(slot === this.selectedSlot && isHeld(state));
  }

  #outline(id, color, { cell, gap, unit }) {
    if (id < 0 || id >= this.view.numBlocks) return;
    const { x, y } = this.layout.origin(id);
    this.ctx.strokeStyle = color;
    this.ctx.lineWidth = 2 * unit;
    this.ctx.strokeRect(x - gap, y - gap, cell + gap, cell + gap);
  }

  // ---- reading back ----

  /** Where a block is, in CSS pixels relative to the canvas; null for no block. */
  cellRect(id) {
    if (id < 0 || id >= this.view.numBlocks) return null;
    const { x, y } = this.layout.origin(id);
    const { ratio, cell } = this.layout;
    return { x: x / ratio, y: y / ratio, width: cell / ratio, height: cell / ratio };
  }

  /** What the canvas really shows for a block: [r, g, b] of a pixel that no glyph covers, near the cell's centre. */
  pixel(id) {
    const { x, y } = this.layout.origin(id);
    const point = bodyPoint(cellState(this.view.cells[id]), glyphMetrics(this.layout));
    // Through a copy, so that reading never changes how the browser draws the grid itself.
    const copy = (this.probe ??= makeProbe());
    copy.clearRect(0, 0, 1, 1); // what lies outside the canvas is drawn as nothing, not as what was read before
    copy.drawImage(this.canvas, Math.floor(x + point.x), Math.floor(y + point.y), 1, 1, 0, 0, 1, 1);
    return [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  }

  /** The undimmed colour of a state (a number) for a slot, in the mode that is on. */
  colorOf(state, slot = NO_SLOT) {
    return blockRgb(this.theme, this.mode, state, slot);
  }
}

function makeProbe() {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  return canvas.getContext("2d", { willReadFrequently: true });
}
