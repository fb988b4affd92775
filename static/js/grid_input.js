// Pointer and keys on the block grid: tooltip, selection, zoom, pan, block cursor.

import { STATES } from "./palette.js";
import { STATE, NO_SLOT, cellAux, cellSlot, cellState } from "./wire.js";
import { isHeld } from "./palette.js";

const DRAG_CSS = 5; // a shorter move is a click that was not quite still
const WHEEL_STEP = 1.0018;
const TOOLTIP_OFFSET_CSS = 14;

/** What is known of a block, in words. `nameOf(slot)` gives the request in a slot, or "". */
export function describeBlock(view, id, nameOf) {
  const cell = view.cells[id];
  const state = cellState(cell);
  const slot = cellSlot(cell);
  const aux = cellAux(cell);
  const words = [`Block ${id}: ${STATES[state]}`];
  if (state === STATE.TAIL) words.push(`${aux} of ${view.blockSize} tokens`);
  if (state === STATE.SHARED) words.push(`${aux === 255 ? "255 or more" : aux} holders`);
  if (state === STATE.RESERVED) words.push("still empty");
  if (slot !== NO_SLOT && isHeld(state)) words.push(`${state === STATE.SHARED ? "oldest: " : ""}${nameOf(slot) || "request"} in slot ${slot}`);
  if (slot !== NO_SLOT && state === STATE.CACHED) words.push(`last held in slot ${slot}`);
  return words.join(", ");
}

/** Wires a `BlockGrid`. `host`: {repaint(), select(slot), announce(text), nameOf(slot)}. */
export class GridInput {
  constructor(grid, tooltip, host) {
    this.grid = grid;
    this.tooltip = tooltip;
    this.host = host;
    this.drag = null;
    const { canvas } = grid;
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    canvas.addEventListener("pointerleave", () => this.#leave());
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointerup", (event) => this.#up(event));
    canvas.addEventListener("pointercancel", () => this.#endDrag());
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => this.#focus());
    canvas.addEventListener("blur", () => host.repaint());
  }

  #at(event) {
    const { ratio } = this.grid.layout;
    return { x: event.offsetX * ratio, y: event.offsetY * ratio };
  }

  #move(event) {
    const { grid } = this;
    const { x, y } = this.#at(event);
    if (this.drag && event.buttons === 1) {
      const { ratio } = grid.layout;
      this.drag.moved ||= Math.hypot(x - this.drag.x0, y - this.drag.y0) > DRAG_CSS * ratio;
      if (this.drag.moved) {
        grid.layout.panBy(x - this.drag.x, y - this.drag.y);
        grid.canvas.classList.add("is-panning");
        Object.assign(this.drag, { x, y });
      }
    }
    grid.hover = this.drag?.moved ? -1 : grid.layout.blockAt(x, y);
    this.pointer = { x: event.offsetX, y: event.offsetY };
    this.updateTooltip();
    this.host.repaint();
  }

  #leave() {
    this.grid.hover = -1;
    this.updateTooltip();
    this.host.repaint();
  }

  /** Put the block under the pointer into words; called again whenever the picture changes. */
  updateTooltip() {
    const { grid, tooltip } = this;
    const { hover } = grid;
    tooltip.hidden = hover < 0;
    if (hover < 0) return;
    const text = describeBlock(grid.view, hover, this.host.nameOf).replaceAll(", ", "\n").replace(": ", "  ");
    if (tooltip.textContent !== text) tooltip.textContent = text;
    const { x, y } = this.pointer;
    const flipX = x + TOOLTIP_OFFSET_CSS + tooltip.offsetWidth > grid.canvas.clientWidth;
    const flipY = y + TOOLTIP_OFFSET_CSS + tooltip.offsetHeight > grid.canvas.clientHeight;
    const left = flipX ? x - tooltip.offsetWidth - TOOLTIP_OFFSET_CSS : x + TOOLTIP_OFFSET_CSS;
    const top = flipY ? y - tooltip.offsetHeight - TOOLTIP_OFFSET_CSS : y + TOOLTIP_OFFSET_CSS;
    tooltip.style.transform = `translate(${Math.max(0, left)}px, ${Math.max(0, top)}px)`;
  }

  #down(event) {
    if (event.button !== 0) return;
    const { x, y } = this.#at(event);
    this.drag = { x0: x, y0: y, x, y, moved: false };
    if (!this.grid.layout.isFit) this.grid.canvas.setPointerCapture(event.pointerId);
  }

  #up(event) {
    const wasClick = this.drag && !this.drag.moved;
    this.#endDrag();
    if (!wasClick) return;
    const { x, y } = this.#at(event);
    const id = this.grid.layout.blockAt(x, y);
    if (id >= 0) this.grid.cursor = id;
    this.#selectAt(id);
  }

  #endDrag() {
    this.drag = null;
    this.grid.canvas.classList.remove("is-panning");
    this.host.repaint();
  }

  /** Select the slot of a held block; a second time, or a block that nobody holds, clears. */
  #selectAt(id) {
    const { grid } = this;
    const cell = id >= 0 ? grid.view.cells[id] : 0;
    const slot = isHeld(cellState(cell)) ? cellSlot(cell) : -1;
    this.host.select(slot === grid.selectedSlot ? -1 : slot);
  }

  #wheel(event) {
    const { layout } = this.grid;
    if (layout.isFit && event.deltaY > 0) return; // nothing to zoom out of: the page may scroll
    event.preventDefault();
    const { x, y } = this.#at(event);
    layout.zoomAt(x, y, WHEEL_STEP ** -event.deltaY);
    this.#touchAction();
    this.host.repaint();
  }

  /** Show the whole pool. */
  fit() {
    this.grid.layout.fit();
    this.#touchAction();
    this.host.repaint();
  }

  #touchAction() {
    this.grid.canvas.style.touchAction = this.grid.layout.isFit ? "manipulation" : "none";
  }

  #focus() {
    if (this.grid.cursor < 0 && this.grid.view.numBlocks > 0) this.grid.cursor = 0;
    this.host.repaint();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { grid } = this;
    const { cols, rows, numBlocks } = grid.layout;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -cols, ArrowDown: cols, Home: -grid.cursor, End: numBlocks - 1 - grid.cursor, PageUp: -cols * Math.ceil(rows / 4), PageDown: cols * Math.ceil(rows / 4) };
    if (event.key === "Enter") this.#selectAt(grid.cursor);
    else if (event.key in moves) this.#moveCursor(moves[event.key]);
    else return;
    event.preventDefault();
  }

  #moveCursor(by) {
    const { grid } = this;
    const to = grid.cursor + by;
    if (to < 0 || to >= grid.layout.numBlocks) return;
    grid.cursor = to;
    grid.layout.reveal(to);
    this.host.announce(describeBlock(grid.view, to, this.host.nameOf));
    this.host.repaint();
  }
}
