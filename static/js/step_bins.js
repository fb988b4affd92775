// Step rows in columns of `width` steps, so that a chart draws at most one column per pixel at any zoom.
// A column shows its highest step, never an average: a spike of one step stays visible. No DOM: runs in node too.

import { rowSwaps } from "./step_ring.js";

const CAPACITY = 8192;
const IDLE_MS = 1000;
const NO_STEP = 0xffffffff;

const FIELDS = {
  step: Uint32Array, // the step with most tokens, which the tooltip describes
  used: Uint32Array,
  cached: Uint32Array,
  prefillTokens: Uint32Array,
  decodeTokens: Uint32Array,
  running: Uint16Array,
  waiting: Uint16Array,
  stepMs: Float32Array,
  preemptions: Uint32Array,
  swaps: Uint32Array, // those of them that kept blocks in the host tier
  evictions: Uint32Array,
  hitBlocks: Uint32Array,
  finished: Uint32Array,
  idleMs: Float32Array, // time without a step just before this column, 0 when short
  flags: Uint8Array, // ROW_… bits of any of its steps
};

/** Columns over a StepRing. Column number = floor(step / width); `at(column)` is its place in the arrays. */
export class StepBins {
  constructor(width) {
    this.width = width;
    for (const [name, Type] of Object.entries(FIELDS)) this[name] = new Type(CAPACITY);
    this.clear();
  }

  clear() {
    this.numSeen = 0;
    this.first = 0;
    this.end = 0; // columns [first, end) are held
    this.lastStep = NO_STEP;
    this.lastT = 0;
    this.lastMs = 0;
  }

  at(column) {
    return column % CAPACITY;
  }

  has(column) {
    return column >= this.first && column < this.end && this.step[this.at(column)] !== NO_STEP;
  }

  /** Take the rows that came since the last call. `numBlocks`: size of the pool. */
  update(ring, numBlocks) {
    if (ring.total < this.numSeen) this.clear();
    const numNew = Math.min(ring.total - this.numSeen, ring.length);
    this.numSeen = ring.total;
    for (let i = ring.length - numNew; i < ring.length; i++) this.#add(ring.columns, ring.index(i), numBlocks);
  }

  #add(columns, row, numBlocks) {
    const step = columns.step[row];
    const column = Math.floor(step / this.width);
    this.#extendTo(column);
    const at = this.at(column);
    const ms = columns.scheduleMs[row] + columns.forwardMs[row] + columns.sampleMs[row] + columns.hostMs[row];
    const tokens = columns.prefillTokens[row] + columns.decodeTokens[row];
    const isHigher = this.step[at] === NO_STEP || tokens > this.prefillTokens[at] + this.decodeTokens[at];
    if (isHigher) {
      this.step[at] = step;
      this.prefillTokens[at] = columns.prefillTokens[row];
      this.decodeTokens[at] = columns.decodeTokens[row];
    }
    const used = numBlocks - columns.free[row] - columns.cached[row];
    if (used >= this.used[at]) {
      this.used[at] = used;
      this.cached[at] = columns.cached[row];
    }
    this.running[at] = Math.max(this.running[at], columns.running[row]);
    this.waiting[at] = Math.max(this.waiting[at], columns.waiting[row]);
    this.stepMs[at] = Math.max(this.stepMs[at], ms);
    for (const name of ["preemptions", "evictions", "hitBlocks", "finished"]) this[name][at] += columns[name][row];
    this.swaps[at] += rowSwaps(columns.flags[row]);
    this.flags[at] |= columns.flags[row];
    // Only between two steps that follow each other: what went on in rows that are lost, nobody knows.
    const idle = step === this.lastStep + 1 ? columns.tMs[row] - this.lastT - this.lastMs : 0;
    if (idle > IDLE_MS) this.idleMs[at] += idle;
    this.lastStep = step;
    this.lastT = columns.tMs[row];
    this.lastMs = ms;
  }

  #extendTo(column) {
    if (this.end === 0 || column - this.end >= CAPACITY) this.first = this.end = column;
    for (; this.end <= column; this.end++) {
      const at = this.at(this.end);
      for (const name of Object.keys(FIELDS)) this[name][at] = 0;
      this.step[at] = NO_STEP;
    }
    this.first = Math.max(this.first, this.end - CAPACITY);
  }
}
