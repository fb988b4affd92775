// The second channel of the grid: what tells block states apart without colour. Drawn over the cell image,
// for visible cells only, and only where a cell is large enough to carry it.

import { blockRgb, css, inkOn, mix } from "./palette.js";
import { STATE, cellAux, cellSlot, cellState } from "./wire.js";

const MIN_GLYPH_CSS = 8;
const MIN_COUNT_CSS = 13;
const MIN_GAP_DEVICE = 4;
const MAX_GLYPHS = 20_000;
const DIM_ALPHA = 0.25;

/** Pixel widths that follow from the cell size alone. */
export function glyphMetrics(layout) {
  const { cell, ratio } = layout;
  const gap = cell >= MIN_GAP_DEVICE ? Math.max(1, Math.round(cell * 0.06)) : 0;
  const unit = Math.max(1, Math.round(ratio));
  return {
    cell,
    gap,
    box: cell - gap,
    unit,
    border: cell >= 24 * ratio ? 2 * unit : unit,
    hatchStep: Math.min(8 * unit, Math.max(4 * unit, Math.round(cell / 3))),
    hasGlyphs: cell >= MIN_GLYPH_CSS * ratio,
    hasCounts: cell >= MIN_COUNT_CSS * ratio,
  };
}

function isHatched(x, y, metrics) {
  return (x + y) % metrics.hatchStep < metrics.unit;
}

/** Rows of a tail's box that are filled: exact to the pixel, at least one. */
export function tailFill(filled, blockSize, metrics) {
  return Math.min(metrics.box, Math.max(metrics.unit, Math.round((metrics.box * filled) / blockSize)));
}

/** A pixel inside the cell, relative to its corner, that always shows the plain state colour. */
export function bodyPoint(state, metrics) {
  const { box, border, unit, hasGlyphs } = metrics;
  if (!hasGlyphs) return { x: box / 2, y: box / 2 };
  let x = Math.floor(box / 2);
  let y = Math.floor(box / 2);
  if (state === STATE.TAIL) y = box - unit;
  if (state === STATE.SHARED) y = box - border - 1;
  if (state === STATE.RESERVED || state === STATE.OFFLOADED) x = border;
  if (state === STATE.CACHED) while (isHatched(x, y, metrics)) x += 1;
  return { x, y };
}

/** Lines of background between the cells. */
export function drawGaps(ctx, layout, metrics, theme) {
  if (metrics.gap === 0) return;
  const { firstRow, endRow, firstCol, endCol } = layout.visible();
  const { cell, gap } = metrics;
  const left = layout.gutter + layout.panX;
  ctx.fillStyle = css(theme.grid);
  for (let col = firstCol; col < endCol; col++) ctx.fillRect(left + (col + 1) * cell - gap, 0, gap, layout.height);
  for (let row = firstRow; row < endRow; row++) {
    ctx.fillRect(layout.gutter, layout.panY + (row + 1) * cell - gap, layout.width - layout.gutter, gap);
  }
}

/** Glyphs of one painted frame: cells are collected into a few paths, then drawn state by state. */
export class GlyphPainter {
  #tileKey = "";
  #tile = null;

  /** `isDim(state, slot)` says whether a cell is dimmed by the selection. */
  draw(ctx, layout, metrics, { view, theme, mode, isDim }) {
    if (!metrics.hasGlyphs) return;
    const { firstRow, endRow, firstCol, endCol } = layout.visible();
    if ((endRow - firstRow) * (endCol - firstCol) > MAX_GLYPHS) return;
    const groups = [newGroup(), newGroup()];
    for (let row = firstRow; row < endRow; row++) {
      const end = Math.min(row * layout.cols + endCol, view.numBlocks);
      for (let id = row * layout.cols + firstCol; id < end; id++) {
        const cell = view.cells[id];
        const state = cellState(cell);
        if (state === STATE.FREE || state === STATE.ACTIVE) continue;
        const group = groups[isDim(state, cellSlot(cell)) ? 1 : 0];
        collect(group, cell, layout.origin(id), metrics, view.blockSize);
      }
    }
    groups.forEach((group, i) => {
      ctx.globalAlpha = i === 0 ? 1 : DIM_ALPHA;
      this.#drawGroup(ctx, group, layout, metrics, theme);
      if (metrics.hasCounts) drawCounts(ctx, group.shared, metrics, (slot) => inkOn(blockRgb(theme, mode, STATE.SHARED, slot)));
    });
    ctx.globalAlpha = 1;
  }

  #drawGroup(ctx, group, layout, metrics, theme) {
    ctx.fillStyle = css(theme.grid, 0.74);
    ctx.fill(group.unfilled);
    ctx.fillStyle = this.#hatch(ctx, layout, metrics, theme);
    ctx.fill(group.hatched);
    ctx.lineWidth = metrics.border;
    ctx.strokeStyle = css(theme.light ? theme.text : mix(theme.text, [255, 255, 255], 0.6));
    ctx.stroke(group.bordered);
    ctx.strokeStyle = css(theme.text, 0.7);
    ctx.stroke(group.crossed);
  }

  /** Diagonal lines, one per step, plotted pixel by pixel: no blur at any size. */
  #hatch(ctx, layout, metrics, theme) {
    const key = `${metrics.cell}|${metrics.hatchStep}|${metrics.unit}|${theme.grid}`;
    if (key !== this.#tileKey) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = metrics.cell;
      const pen = tile.getContext("2d");
      pen.fillStyle = css(theme.grid, 0.42);
      for (let y = 0; y < metrics.cell; y++) {
        for (let x = 0; x < metrics.cell; x++) if (isHatched(x, y, metrics)) pen.fillRect(x, y, 1, 1);
      }
      this.#tileKey = key;
      this.#tile = tile;
    }
    const pattern = ctx.createPattern(this.#tile, "repeat");
    pattern.setTransform(new DOMMatrix([1, 0, 0, 1, layout.gutter + layout.panX, layout.panY]));
    return pattern;
  }
}

function newGroup() {
  return { unfilled: new Path2D(), hatched: new Path2D(), bordered: new Path2D(), crossed: new Path2D(), shared: [] };
}

function collect(group, cell, { x, y }, metrics, blockSize) {
  const state = cellState(cell);
  const { box, border } = metrics;
  if (state === STATE.CACHED) group.hatched.rect(x, y, box, box);
  if (state === STATE.TAIL) group.unfilled.rect(x, y, box, box - tailFill(cellAux(cell), blockSize, metrics));
  if (state === STATE.SHARED) {
    group.bordered.rect(x + border / 2, y + border / 2, box - border, box - border);
    group.shared.push({ x: x + box / 2, y: y + box / 2, cell });
  }
  if (state === STATE.RESERVED || state === STATE.OFFLOADED) {
    const inset = box * 0.25;
    group.crossed.moveTo(x + inset, y + inset);
    group.crossed.lineTo(x + box - inset, y + box - inset);
    if (state === STATE.RESERVED) {
      group.crossed.moveTo(x + box - inset, y + inset);
      group.crossed.lineTo(x + inset, y + box - inset);
    }
  }
}

/** Number of holders; more than nine are a plus. */
function drawCounts(ctx, shared, metrics, inkOf) {
  const size = Math.round(Math.min(metrics.cell * 0.58, 15 * metrics.unit));
  ctx.font = `700 ${size}px ui-monospace, "DejaVu Sans Mono", monospace`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (const { x, y, cell } of shared) {
    const holders = cellAux(cell);
    ctx.fillStyle = css(inkOf(cellSlot(cell)));
    ctx.fillText(holders > 9 ? "+" : String(holders), x, y + size * 0.06);
  }
}

/** Id of the first block of a row, left of it, as often as there is room. */
export function drawRowLabels(ctx, layout, metrics, theme) {
  if (layout.gutter === 0) return;
  const { firstRow, endRow } = layout.visible();
  const every = 2 ** Math.max(0, Math.ceil(Math.log2((13 * layout.ratio) / metrics.cell)));
  ctx.fillStyle = css(theme.grid);
  ctx.fillRect(0, 0, layout.gutter, layout.height);
  ctx.fillStyle = css(theme.muted);
  ctx.font = `${10 * layout.ratio}px ui-monospace, "DejaVu Sans Mono", monospace`;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  for (let row = Math.ceil(firstRow / every) * every; row < endRow; row += every) {
    const y = Math.max(6 * layout.ratio, layout.panY + row * metrics.cell + metrics.box / 2);
    ctx.fillText(String(row * layout.cols), layout.gutter - 6 * layout.ratio, y);
  }
}
