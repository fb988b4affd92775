// Where each block lies: pure geometry, no canvas. Lengths are device pixels unless a name says otherwise.

const MAX_CELL_CSS = 40;
const ROUND_COLS = [32, 16, 8]; // row labels that can be read off: 0, 48, 96 rather than 0, 50, 100
const ROUND_SHARE = 0.86; // a cell may shrink to this share for a round number of columns
const MAX_ZOOM = 64;
const MIN_WHOLE_CELL = 4;

/**
 * About the largest whole cell with which `numBlocks` cells fit into width × height, row by row, in a round number
 * of columns where that costs little.
 * Small cells may have any size, smaller than a pixel when the pool has more blocks than the area has pixels.
 */
export function fitCells(numBlocks, width, height, maxCell) {
  const fits = (cell, cols) => cols >= 1 && Math.ceil(numBlocks / cols) * cell <= height;
  let largest = Math.min(maxCell, Math.floor(Math.sqrt((width * height) / numBlocks)) + 1);
  while (largest >= MIN_WHOLE_CELL && !fits(largest, Math.floor(width / largest))) largest--;
  for (const round of largest >= MIN_WHOLE_CELL ? ROUND_COLS : []) {
    for (let cell = largest; cell >= largest * ROUND_SHARE; cell--) {
      const cols = Math.floor(width / cell / round) * round;
      if (fits(cell, cols)) return { cell, cols };
    }
  }
  if (largest >= MIN_WHOLE_CELL) return { cell: largest, cols: Math.floor(width / largest) };
  return fill(numBlocks, width, height);
}

/** Cells of any size that fill the area, for pools so large that whole pixels would waste much of it. */
function fill(numBlocks, width, height) {
  const cols = Math.ceil(Math.sqrt((numBlocks * width) / height));
  return { cell: Math.min(width / cols, height / Math.ceil(numBlocks / cols)), cols };
}

/** Physical layout (row by row, by block id) with zoom and pan. */
export class GridLayout {
  constructor() {
    this.numBlocks = 0;
    this.zoom = 1;
    this.panX = 0;
    this.panY = 0;
    this.resize(1, 1, 1, 0);
  }

  setBlocks(numBlocks) {
    this.numBlocks = numBlocks;
    this.resize(this.width, this.height, this.ratio, this.gutter);
    this.fit();
  }

  /** New canvas size; `gutter` is the space left of the cells that holds row labels. */
  resize(width, height, ratio, gutter) {
    Object.assign(this, { width, height, ratio, gutter });
    const fit = fitCells(Math.max(this.numBlocks, 1), Math.max(width - gutter, 1), Math.max(height, 1), MAX_CELL_CSS * ratio);
    this.fitCell = fit.cell;
    this.cols = fit.cols;
    this.rows = Math.ceil(this.numBlocks / fit.cols);
    this.clampPan();
  }

  /** Side of a cell; whole from 4 px on, so that edges are crisp at every zoom. */
  get cell() {
    const cell = this.fitCell * this.zoom;
    return cell >= MIN_WHOLE_CELL ? Math.round(cell) : cell;
  }

  get isFit() {
    return this.zoom === 1;
  }

  fit() {
    this.zoom = 1;
    this.panX = 0;
    this.panY = 0;
  }

  /** Zoom by `factor`, keeping what is under (x, y) in place. */
  zoomAt(x, y, factor) {
    const before = this.cell;
    const inX = (x - this.gutter - this.panX) / before;
    const inY = (y - this.panY) / before;
    this.zoom = Math.min(MAX_ZOOM, Math.max(1, this.zoom * factor));
    this.panX = x - this.gutter - inX * this.cell;
    this.panY = y - inY * this.cell;
    this.clampPan();
  }

  panBy(dx, dy) {
    this.panX += dx;
    this.panY += dy;
    this.clampPan();
  }

  clampPan() {
    const minX = Math.min(0, this.width - this.gutter - this.cols * this.cell);
    const minY = Math.min(0, this.height - this.rows * this.cell);
    this.panX = Math.round(Math.min(0, Math.max(minX, this.panX)));
    this.panY = Math.round(Math.min(0, Math.max(minY, this.panY)));
  }

  /** Block under (x, y), -1 if none. */
  blockAt(x, y) {
    const col = Math.floor((x - this.gutter - this.panX) / this.cell);
    const row = Math.floor((y - this.panY) / this.cell);
    if (x < this.gutter || col < 0 || col >= this.cols || row < 0) return -1;
    const id = row * this.cols + col;
    return id < this.numBlocks ? id : -1;
  }

  /** Top left corner of a block's cell. */
  origin(id) {
    const { cell } = this;
    return {
      x: this.gutter + this.panX + (id % this.cols) * cell,
      y: this.panY + Math.floor(id / this.cols) * cell,
    };
  }

  /** Half-open ranges of the rows and columns that are (partly) in view. */
  visible() {
    const { cell } = this;
    return {
      firstRow: Math.max(0, Math.floor(-this.panY / cell)),
      endRow: Math.min(this.rows, Math.ceil((this.height - this.panY) / cell)),
      firstCol: Math.max(0, Math.floor(-this.panX / cell)),
      endCol: Math.min(this.cols, Math.ceil((this.width - this.gutter - this.panX) / cell)),
    };
  }

  /** Scroll just enough to bring a block into view. */
  reveal(id) {
    const { x, y } = this.origin(id);
    const { cell } = this;
    this.panBy(
      Math.max(0, this.gutter - x) - Math.max(0, x + cell - this.width),
      Math.max(0, -y) - Math.max(0, y + cell - this.height),
    );
  }
}
