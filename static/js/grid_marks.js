// Things that happened to blocks a moment ago, fading out over the grid. They never change a cell's own colour.

import { MarkCursor } from "./mark_cursor.js";
import { css } from "./palette.js";
import { MARK } from "./wire.js";

const DECAY_MS = 400;
const STILL_MS = 1000;
// When much of the picture is marked at once, marks get fainter: large areas must not blink.
const CALM_SHARE = 0.2;
// How much a mark tells: of a block's marks in one step the more telling one is shown.
const RANKS = new Map([
  [MARK.ALLOCATE, 0], [MARK.LOOKAHEAD, 0], [MARK.HIT, 1], [MARK.EVICT, 1], [MARK.FREED_BY_PREEMPTION, 1],
  [MARK.SWAP_OUT, 2], [MARK.SWAP_IN, 2],
]);

/** Whether mark `next` of a block takes the place of `known`: it is of a later step, or tells as much. */
export function replaces(next, known) {
  return known === undefined || next.step !== known.step || RANKS.get(next.kind) >= RANKS.get(known.kind);
}

/** Marks by block; the newest of a block wins. */
export class GridMarks {
  #marks = new Map();
  #cursor = new MarkCursor();
  #epoch = 0;
  #reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

  /** Take what is new in the view's list of marks. */
  take(view) {
    if (view.epoch !== this.#epoch) this.#marks.clear(); // they belong to another picture
    this.#epoch = view.epoch;
    for (const { step, kind, blockId, at, live } of this.#cursor.take(view)) {
      const next = { step, kind, since: at };
      if (live && RANKS.has(kind) && replaces(next, this.#marks.get(blockId))) this.#marks.set(blockId, next);
    }
  }

  clear() {
    this.#marks.clear();
  }

  get isEmpty() {
    return this.#marks.size === 0;
  }

  draw(ctx, layout, metrics, theme, now) {
    const life = this.#reducedMotion.matches ? STILL_MS : DECAY_MS;
    const { firstRow, endRow, firstCol, endCol } = layout.visible();
    const numVisible = Math.max(1, (endRow - firstRow) * (endCol - firstCol));
    const calm = Math.min(1, (CALM_SHARE * numVisible) / Math.max(1, this.#marks.size));
    for (const [id, { kind, since }] of this.#marks) {
      const age = (now - since) / life;
      if (age >= 1 || id >= layout.numBlocks) {
        this.#marks.delete(id);
        continue;
      }
      const { x, y } = layout.origin(id);
      if (x + metrics.cell < layout.gutter || y + metrics.cell < 0 || x > layout.width || y > layout.height) continue;
      if (this.#reducedMotion.matches) drawTick(ctx, x, y, kind, metrics, theme);
      else drawMark(ctx, { x, y, kind, alpha: (1 - age) * calm }, metrics, theme);
    }
  }
}

function markRgb(kind, theme) {
  if (kind === MARK.EVICT) return theme.bad;
  if (kind === MARK.FREED_BY_PREEMPTION) return theme.warn;
  if (kind === MARK.SWAP_OUT || kind === MARK.SWAP_IN) return theme.prefill;
  return theme.light && kind === MARK.HIT ? theme.text : [255, 255, 255];
}

function drawMark(ctx, { x, y, kind, alpha }, metrics, theme) {
  const size = metrics.box || metrics.cell;
  const rgb = markRgb(kind, theme);
  if (!metrics.hasGlyphs || kind === MARK.ALLOCATE) {
    ctx.fillStyle = css(rgb, 0.45 * alpha);
    ctx.fillRect(x, y, size, size);
    return;
  }
  if (kind !== MARK.HIT) {
    ctx.fillStyle = css(theme.grid, 0.8 * alpha);
    ctx.fillRect(x, y, size, size);
  }
  const width = Math.max(2 * metrics.unit, Math.round(size * 0.1));
  ctx.strokeStyle = css(rgb, Math.min(0.99, alpha));
  ctx.lineWidth = width;
  ctx.beginPath();
  if (kind === MARK.HIT) ctx.rect(x + width / 2, y + width / 2, size - width, size - width);
  else strokeLines(ctx, x, y, size, kind);
  ctx.stroke();
}

/** Up to the host tier, down from it; + for a block reserved ahead of need. */
function strokeArrow(ctx, x, y, size, kind) {
  const inset = size * 0.22;
  const middle = x + size / 2;
  ctx.moveTo(middle, y + inset);
  ctx.lineTo(middle, y + size - inset);
  if (kind === MARK.LOOKAHEAD) {
    ctx.moveTo(x + inset, y + size / 2);
    ctx.lineTo(x + size - inset, y + size / 2);
    return;
  }
  const isUp = kind === MARK.SWAP_OUT;
  const tip = isUp ? y + inset : y + size - inset;
  ctx.moveTo(x + inset, y + size / 2);
  ctx.lineTo(middle, tip);
  ctx.lineTo(x + size - inset, y + size / 2);
}

/** ✕ for an eviction, three diagonals for blocks freed by a preemption. */
function strokeLines(ctx, x, y, size, kind) {
  const inset = size * 0.22;
  if (kind === MARK.SWAP_OUT || kind === MARK.SWAP_IN || kind === MARK.LOOKAHEAD) {
    strokeArrow(ctx, x, y, size, kind);
    return;
  }
  if (kind === MARK.EVICT) {
    ctx.moveTo(x + inset, y + inset);
    ctx.lineTo(x + size - inset, y + size - inset);
    ctx.moveTo(x + size - inset, y + inset);
    ctx.lineTo(x + inset, y + size - inset);
    return;
  }
  for (const share of [0.5, 1, 1.5]) {
    const sum = size * share;
    ctx.moveTo(x + Math.max(0, sum - size), y + Math.min(size, sum));
    ctx.lineTo(x + Math.min(size, sum), y + Math.max(0, sum - size));
  }
}

function drawTick(ctx, x, y, kind, metrics, theme) {
  const size = Math.max(2, Math.round((metrics.box || metrics.cell) * 0.35));
  ctx.fillStyle = css(markRgb(kind, theme));
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(x + size, y);
  ctx.lineTo(x, y + size);
  ctx.fill();
}
