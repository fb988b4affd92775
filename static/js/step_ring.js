// The newest step rows in columns, so that a chart walks one typed array. No DOM: runs in node too.

import { ROW_BYTES } from "./wire.js";

// name: [array type, DataView getter, offset in the 64-byte row]
const COLUMNS = {
  step: [Uint32Array, "getUint32", 0],
  kind: [Uint8Array, "getUint8", 4],
  stopReason: [Uint8Array, "getUint8", 5],
  flags: [Uint16Array, "getUint16", 6],
  tMs: [Float64Array, "getFloat64", 8],
  scheduleMs: [Float32Array, "getFloat32", 16],
  forwardMs: [Float32Array, "getFloat32", 20],
  sampleMs: [Float32Array, "getFloat32", 24],
  hostMs: [Float32Array, "getFloat32", 28],
  prefillTokens: [Uint32Array, "getUint32", 32],
  decodeTokens: [Uint32Array, "getUint32", 36],
  prefillSeqs: [Uint16Array, "getUint16", 40],
  decodeSeqs: [Uint16Array, "getUint16", 42],
  running: [Uint16Array, "getUint16", 44],
  waiting: [Uint16Array, "getUint16", 46],
  free: [Uint32Array, "getUint32", 48],
  cached: [Uint32Array, "getUint32", 52],
  preemptions: [Uint16Array, "getUint16", 56],
  finished: [Uint16Array, "getUint16", 58],
  evictions: [Uint16Array, "getUint16", 60],
  hitBlocks: [Uint16Array, "getUint16", 62],
};

const FIELDS = Object.entries(COLUMNS).map(([name, [, getter, offset]]) => ({ name, getter, offset }));

/** Names of the columns, as in `ring.columns` and `ring.get`. */
export const STEP_FIELDS = Object.freeze(Object.keys(COLUMNS));

/** `kind` of a row. */
export const ROW_KIND = Object.freeze({ STEP: 0, CONTROL: 1 });

/** Bit 0 of `flags`: the engine was reset in this step. */
export const ROW_RESET = 1;
/** The policies were changed. */
export const ROW_POLICIES = 2;
/** A request was ended because nothing could go on. */
export const ROW_STALLED = 4;
/** A copy from the host tier ended for which a step had to wait. */
export const ROW_WAITED = 8;
/** Blocks were copied to the host tier. */
export const ROW_SWAPPED_OUT = 16;
/** Blocks began to be copied back from it. */
export const ROW_SWAPPED_IN = 32;

/** How many of the step's preemptions kept blocks in the host tier. */
export const rowSwaps = (flags) => flags >>> 8;

/**
 * Ring of step rows, oldest first. Row i (0 = oldest, length - 1 = newest) lies at `index(i)` of each column.
 * `total` counts the rows ever pushed, so a chart can tell what is new.
 */
export class StepRing {
  constructor(capacity = 65536) {
    this.capacity = capacity;
    this.columns = {};
    for (const [name, [Type]] of Object.entries(COLUMNS)) this.columns[name] = new Type(capacity);
    this.clear();
  }

  clear() {
    this.head = 0; // where the oldest row lies
    this.length = 0;
    this.total = 0;
  }

  /** Step number of the newest row, -1 when there is none. */
  get lastStep() {
    return this.length ? this.columns.step[this.index(this.length - 1)] : -1;
  }

  /** Position in the columns of row i, counted from the oldest. */
  index(i) {
    return (this.head + i) % this.capacity;
  }

  /** One value: `ring.get("forwardMs", ring.length - 1)`. */
  get(name, i) {
    return this.columns[name][this.index(i)];
  }

  /** One row as an object. */
  row(i) {
    const at = this.index(i);
    return Object.fromEntries(STEP_FIELDS.map((name) => [name, this.columns[name][at]]));
  }

  /** Which row holds `step`; when it is not here, the first later one (`length` when there is none). */
  find(step) {
    let low = 0;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.get("step", middle) < step) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Append the row at `offset` of `view`; the oldest makes room. */
  push(view, offset) {
    let at = this.head + this.length;
    if (this.length === this.capacity) {
      at = this.head;
      this.head = (this.head + 1) % this.capacity;
    } else {
      this.length++;
    }
    at %= this.capacity;
    for (const { name, getter, offset: field } of FIELDS) {
      this.columns[name][at] = view[getter](offset + field, true);
    }
    this.total++;
  }
}

/** Step numbers of the encoded rows in `view`. */
export function* rowSteps(view) {
  for (let offset = 0; offset < view.byteLength; offset += ROW_BYTES) yield view.getUint32(offset, true);
}
