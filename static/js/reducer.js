// The engine's picture in the browser: a fold over the messages of /ws/engine. No DOM: runs in node too.

import { StepRing, rowSteps } from "./step_ring.js";
import { FRAME, PROTOCOL, ROW_BYTES, WireError, decodeMessage } from "./wire.js";

export { cellAux, cellHashed, cellSlot, cellState } from "./wire.js";

const MAX_MARKS = 4096;
const MAX_GAPS = 256;
// Of a HELLO's config. The page reserves memory for what these say, so they are checked: the engine's own limits.
const CONFIG_LIMITS = Object.entries({
  num_blocks: 2 ** 24, block_size: 256, max_num_seqs: 4096, max_num_batched_tokens: 2 ** 20,
});
const NO_CELLS = new Uint32Array(0);

/**
 * What the page knows of the engine. Read its fields freely; only `apply` changes them.
 *
 * - `hello`: the newest HELLO (null before the first), `session`, `status`, `model` from it
 * - `serverMs`: the server's clock now, in Unix milliseconds, as of the newest HELLO; of a recording it says nothing
 * - `numBlocks`, `blockSize`, `cells`: packed cell of each block (see cellState …); no blocks while the model loads
 * - `step`: the step that `cells` shows; `tMs` its time
 * - `steps`: StepRing of step rows
 * - `batch`: {step, entries: [{slot, kind, tokens, seqId}]}, that of the newest scheduling step
 * - `host`: {total, used, pinned, loading} blocks of the host tier and sequences that wait for some; null: there is none
 * - `marks`: newest events, oldest first: {step, kind, detail, slot, blockId, seqId, at, live}; `at` is the clock at arrival,
 *   `live` is false for those that had happened before this connection began; `marksTotal` counts all ever seen
 * - `marksLost`: marks that did not fit on the wire
 * - `epoch`: changes whenever rows and marks begin afresh: another server run, or another place in a recording
 * - `gaps`: [{firstStep, nSteps}] rows that were lost for this page, the newest of them; `rowsLost` counts all
 */
export class EngineView {
  #lastLost = -1; // newest step that is known to be missing
  #clockOffsetMs = 0;

  /** @param {{clock?: () => number, ringCapacity?: number}} options clock: milliseconds, for `at` of marks */
  constructor({ clock = () => performance.now(), ringCapacity = 65536 } = {}) {
    this.clock = clock;
    this.epoch = 0;
    this.hello = null;
    this.session = "";
    this.status = "loading";
    this.model = null;
    this.numBlocks = 0;
    this.blockSize = 0;
    this.cells = NO_CELLS;
    this.steps = new StepRing(ringCapacity);
    this.#forget();
  }

  /**
   * Apply one whole message, or nothing at all when it is damaged (WireError).
   * Call it for one message after the other, awaiting each.
   * @param {ArrayBuffer} buffer
   * @returns {Promise<{lastStep: number, changed: Uint32Array | null, hello: boolean}>} ids of the blocks whose cell
   *   may have changed, null for all of them
   */
  async apply(buffer) {
    return this.applyFrames(await decodeMessage(buffer));
  }

  /**
   * Apply the decoded frames of one whole message; as `apply`, but at once.
   * @param {object[]} frames from `decodeMessage`
   * @param {{live?: boolean}} options live: whether its marks happen before the eyes of whoever watches; by default
   *   unless the message begins a connection
   */
  applyFrames(frames, { live } = {}) {
    this.#check(frames);
    const hasHello = frames.some((frame) => frame.type === FRAME.HELLO);
    const changed = [];
    let all = false;
    for (const frame of frames) {
      if (frame.type === FRAME.KEYFRAME) all = true;
      if (frame.type === FRAME.HELLO && this.#takeHello(frame)) all = true;
      this.#take(frame, changed, live ?? !hasHello);
    }
    return { lastStep: this.step, changed: all ? null : concat(changed), hello: hasHello };
  }

  get serverMs() {
    return this.clock() + this.#clockOffsetMs;
  }

  /** Forget everything but the names: the next message begins with HELLO and KEYFRAME, of any step. */
  reset() {
    this.session = "";
    this.#forget();
    this.steps.clear();
  }

  #take(frame, changed, live) {
    switch (frame.type) {
      case FRAME.KEYFRAME:
        this.cells.set(frame.cells);
        this.#moveTo(frame);
        break;
      case FRAME.DELTA:
        changed.push(this.#takeDelta(frame.pairs));
        this.#moveTo(frame);
        break;
      case FRAME.STEPS:
        this.#takeRows(frame.rows);
        break;
      case FRAME.BATCH:
        this.batch = { step: frame.firstStep, entries: frame.entries };
        break;
      case FRAME.MARKS:
        this.#takeMarks(frame, live);
        break;
      case FRAME.HOST:
        this.host = frame.host;
        break;
      case FRAME.GAP:
        this.rowsLost += frame.nSteps;
        this.#lastLost = frame.firstStep + frame.nSteps - 1;
        this.gaps.push({ firstStep: frame.firstStep, nSteps: frame.nSteps });
        if (this.gaps.length > MAX_GAPS) this.gaps.shift();
        break;
      default: // later frame types are skipped
    }
  }

  /** Throw if any frame cannot be applied, so that a message counts whole or not at all. */
  #check(frames) {
    let { numBlocks } = this;
    let pictured = this.step >= 0;
    let lastRow = Math.max(this.steps.lastStep, this.#lastLost);
    for (const frame of frames) {
      if (frame.type === FRAME.HELLO) {
        checkHello(frame.hello);
        numBlocks = blocksOf(frame.hello);
        const same = frame.hello.session === this.session;
        if (!same) lastRow = -1;
        pictured = pictured && same && numBlocks === this.numBlocks;
      } else if (frame.type === FRAME.KEYFRAME) {
        if (frame.nItems !== numBlocks) throw new WireError(`a keyframe of ${frame.nItems} for ${numBlocks} blocks`);
        pictured = true;
      } else if (frame.type === FRAME.DELTA) {
        if (!pictured) throw new WireError("a change came before the first picture");
        checkIds(frame.pairs, numBlocks);
      } else if (frame.type === FRAME.GAP) {
        lastRow = Math.max(lastRow, frame.firstStep + frame.nSteps - 1);
      } else if (frame.type === FRAME.STEPS) {
        lastRow = checkRows(frame.rows, lastRow);
      }
    }
  }

  /** @returns {boolean} whether the picture starts afresh */
  #takeHello({ hello, tMs }) {
    this.#clockOffsetMs = tMs - this.clock();
    const afresh = hello.session !== this.session || blocksOf(hello) !== this.numBlocks;
    if (hello.session !== this.session) {
      this.#forget();
      this.steps.clear();
    }
    this.hello = hello;
    this.session = hello.session;
    this.status = hello.status;
    this.model = hello.model;
    this.blockSize = hello.config?.block_size ?? 0;
    if (afresh) {
      this.numBlocks = blocksOf(hello);
      this.cells = new Uint32Array(this.numBlocks);
      this.step = -1;
    }
    return afresh;
  }

  #forget() {
    this.epoch++;
    this.#lastLost = -1;
    this.step = -1;
    this.tMs = 0;
    this.batch = { step: 0, entries: [] };
    this.host = null;
    this.marks = [];
    this.marksTotal = 0;
    this.marksLost = 0;
    this.rowsLost = 0;
    this.gaps = [];
  }

  #moveTo(frame) {
    this.step = frame.firstStep;
    this.tMs = frame.tMs;
  }

  #takeDelta(pairs) {
    const ids = new Uint32Array(pairs.length / 2);
    for (let i = 0, at = 0; i < ids.length; i++, at += 2) {
      ids[i] = pairs[at];
      this.cells[pairs[at]] = pairs[at + 1];
    }
    return ids;
  }

  #takeRows(rows) {
    const last = this.steps.lastStep;
    for (let offset = 0; offset < rows.byteLength; offset += ROW_BYTES) {
      if (rows.getUint32(offset, true) > last) this.steps.push(rows, offset);
    }
  }

  #takeMarks(frame, live) {
    const at = this.clock();
    for (const mark of frame.marks) this.marks.push({ ...mark, at, live });
    this.marksTotal += frame.marks.length;
    this.marksLost += frame.overflow;
    if (this.marks.length > MAX_MARKS) this.marks.splice(0, this.marks.length - MAX_MARKS);
  }
}

const blocksOf = (hello) => hello.config?.num_blocks ?? 0;

function checkHello(hello) {
  if (hello?.protocol !== PROTOCOL) {
    throw new WireError(`the server speaks protocol ${hello?.protocol}, this page ${PROTOCOL}: reload`, { fatal: true });
  }
  const { session, status, model, config } = hello;
  if (!isText(session) || !isText(status) || !(model === null || isText(model))) throw new WireError("HELLO lacks a name");
  if (config === null) return;
  for (const [name, max] of CONFIG_LIMITS) {
    const value = config?.[name];
    if (!(Number.isInteger(value) && value >= 1 && value <= max)) throw new WireError(`HELLO says that ${name} is ${value}`);
  }
}

const isText = (value) => typeof value === "string" && value !== "";

function checkIds(pairs, numBlocks) {
  for (let at = 0; at < pairs.length; at += 2) {
    if (pairs[at] >= numBlocks) throw new WireError(`block ${pairs[at]} of ${numBlocks}`);
  }
}

/** Rows follow each other without a hole; those that are here already may come again. */
function checkRows(rows, lastRow) {
  let last = lastRow;
  for (const step of rowSteps(rows)) {
    if (last >= 0 && step > last + 1) throw new WireError(`step ${step} follows ${last} without a gap frame`);
    last = Math.max(last, step);
  }
  return last;
}

function concat(parts) {
  if (parts.length === 1) return parts[0];
  const out = new Uint32Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => (out.set(part, at), at + part.length), 0);
  return out;
}
