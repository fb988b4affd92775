// The binary frames of /ws/engine (docs/wire.md). No state, no DOM: runs in browsers and in node.
// Typed arrays read in the machine's byte order; the wire is little-endian, as is every platform that
// runs a browser today.

export const PROTOCOL = 1;
export const HEADER_BYTES = 32;
export const ROW_BYTES = 64;
export const ENTRY_BYTES = 12;
export const MARK_BYTES = 16;
export const ACK_BYTES = 12;
export const HOST_BYTES = 16;

export const FRAME = Object.freeze({
  HELLO: 1, KEYFRAME: 2, DELTA: 3, STEPS: 4, BATCH: 5, MARKS: 6, GAP: 7, ACK: 8, HOST: 9,
});

export const STATE = Object.freeze({
  FREE: 0, CACHED: 1, ACTIVE: 2, TAIL: 3, SHARED: 4, RESERVED: 5, OFFLOADED: 6,
});

export const MARK = Object.freeze({
  ALLOCATE: 1, HIT: 2, EVICT: 3, FREED_BY_PREEMPTION: 4, PREEMPT: 5,
  FINISH: 6, ABORT: 7, REJECT: 8, RESET: 9, ADMIT: 10, SWAP_OUT: 11,
  SWAP_IN: 12, LOOKAHEAD: 13, LOADED: 14, POLICIES: 15, STALLED: 16,
});

export const BATCH_KIND = Object.freeze({ PREFILL: 0, DECODE: 1 });

export const NO_SLOT = 0xffff;
export const NO_ID = 0xffffffff;

const FLAG_DEFLATED = 1;

/** A message that does not follow docs/wire.md. `fatal`: trying again cannot help. */
export class WireError extends Error {
  constructor(message, { fatal = false } = {}) {
    super(message);
    this.name = "WireError";
    this.fatal = fatal;
  }
}

// ---- packed cells: state 4 bits, flags 4, aux 8, slot 16 ----

/** One of STATE. */
export const cellState = (cell) => cell & 15;
/** Whether the block's hash is published, so that it can be shared. */
export const cellHashed = (cell) => (cell & 16) !== 0;
/** Filled tokens of a tail, otherwise the reference count; both stop at 255. */
export const cellAux = (cell) => (cell >>> 8) & 255;
/** Slot of the oldest holder (cached: of the last holder), NO_SLOT for nobody. */
export const cellSlot = (cell) => cell >>> 16;

// ---- messages ----

/**
 * Decode a whole message, inflating what is deflated.
 * @param {ArrayBuffer} buffer
 * @returns {Promise<object[]>} frames in order: {type, firstStep, nSteps, nItems, overflow, tMs} and one of
 *   hello (object), cells (Uint32Array), pairs (Uint32Array id, cell, …), rows (DataView), entries, marks, host
 */
export async function decodeMessage(buffer) {
  const frames = [];
  for (let offset = 0; offset < buffer.byteLength; ) {
    const header = readHeader(buffer, offset);
    const start = offset + HEADER_BYTES;
    const payload = header.flags & FLAG_DEFLATED
      ? await inflate(new Uint8Array(buffer, start, header.payloadBytes), header.nItems * 4)
      : { buffer, start, bytes: header.payloadBytes };
    frames.push(readPayload(header, payload));
    offset = start + Math.ceil(header.payloadBytes / 8) * 8;
  }
  return frames;
}

function readHeader(buffer, offset) {
  if (offset + HEADER_BYTES > buffer.byteLength) throw new WireError("a frame header is cut short");
  const view = new DataView(buffer, offset, HEADER_BYTES);
  const version = view.getUint16(2, true);
  if (version !== PROTOCOL) {
    throw new WireError(`the server speaks version ${version}, this page ${PROTOCOL}: reload`, { fatal: true });
  }
  const payloadBytes = view.getUint32(4, true);
  if (offset + HEADER_BYTES + payloadBytes > buffer.byteLength) throw new WireError("a frame is cut short");
  return {
    type: view.getUint8(0),
    flags: view.getUint8(1),
    payloadBytes,
    firstStep: view.getUint32(8, true),
    nSteps: view.getUint32(12, true),
    nItems: view.getUint32(16, true),
    overflow: view.getUint32(20, true),
    tMs: view.getFloat64(24, true),
  };
}

function readPayload(header, payload) {
  const { type, firstStep, nSteps, nItems, overflow, tMs } = header;
  const frame = { type, firstStep, nSteps, nItems, overflow, tMs };
  switch (type) {
    case FRAME.HELLO:
      frame.hello = readJson(payload);
      break;
    case FRAME.KEYFRAME:
      frame.cells = readWords(payload, nItems);
      break;
    case FRAME.DELTA:
      frame.pairs = readWords(payload, nItems * 2);
      break;
    case FRAME.STEPS:
      frame.rows = readView(payload, nItems, ROW_BYTES);
      break;
    case FRAME.BATCH:
      frame.entries = readEntries(payload, nItems);
      break;
    case FRAME.MARKS:
      frame.marks = readMarks(payload, nItems);
      break;
    case FRAME.HOST:
      frame.host = readHost(payload, nItems);
      break;
    default: // GAP has no payload; later types are skipped
  }
  return frame;
}

function readJson({ buffer, start, bytes }) {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(buffer, start, bytes)));
  } catch {
    throw new WireError("HELLO is not JSON");
  }
}

function readWords({ buffer, start, bytes }, count) {
  if (bytes !== count * 4) throw new WireError(`${count} words announced, ${bytes} bytes sent`);
  return new Uint32Array(buffer, start, count);
}

function readView({ buffer, start, bytes }, count, size) {
  if (bytes !== count * size) throw new WireError(`${count} items of ${size} announced, ${bytes} bytes sent`);
  return new DataView(buffer, start, bytes);
}

function readEntries(payload, count) {
  const view = readView(payload, count, ENTRY_BYTES);
  const entries = new Array(count);
  for (let i = 0, at = 0; i < count; i++, at += ENTRY_BYTES) {
    entries[i] = {
      slot: view.getUint16(at, true),
      kind: view.getUint8(at + 2),
      tokens: view.getUint32(at + 4, true),
      seqId: view.getUint32(at + 8, true),
    };
  }
  return entries;
}

function readMarks(payload, count) {
  const view = readView(payload, count, MARK_BYTES);
  const marks = new Array(count);
  for (let i = 0, at = 0; i < count; i++, at += MARK_BYTES) {
    marks[i] = {
      step: view.getUint32(at, true),
      kind: view.getUint8(at + 4),
      detail: view.getUint8(at + 5),
      slot: view.getUint16(at + 6, true),
      blockId: view.getUint32(at + 8, true),
      seqId: view.getUint32(at + 12, true),
    };
  }
  return marks;
}

function readHost(payload, count) {
  if (count !== 1) throw new WireError(`${count} host tiers`);
  const [total, used, pinned, loading] = readWords(payload, HOST_BYTES / 4);
  if (used > total || pinned > used) throw new WireError(`a host tier of ${total} with ${used} used, ${pinned} pinned`);
  return { total, used, pinned, loading };
}

/** Inflate to exactly `expected` bytes; more or less is an error, and more is never buffered. */
async function inflate(compressed, expected) {
  let out = null;
  let filled = 0;
  try {
    out = new Uint8Array(expected);
    const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    for (const reader = stream.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      out.set(value, filled); // throws a RangeError when there is too much
      filled += value.length;
    }
  } catch {
    throw new WireError("a deflated frame is damaged");
  }
  if (filled !== expected) throw new WireError(`a deflated frame holds ${filled} bytes, not ${expected}`);
  return { buffer: out.buffer, start: 0, bytes: expected };
}

/**
 * @param {{fps: number, hidden: boolean, step: number, painted: number}} ack `painted`: messages painted so far on
 *   this connection
 * @returns {ArrayBuffer}
 */
export function encodeAck({ fps, hidden, step, painted }) {
  const buffer = new ArrayBuffer(ACK_BYTES);
  const view = new DataView(buffer);
  view.setUint8(0, FRAME.ACK);
  view.setUint8(1, Math.min(60, Math.max(1, Math.round(fps))));
  view.setUint16(2, hidden ? 1 : 0, true);
  view.setUint32(4, step, true);
  view.setUint32(8, painted, true);
  return buffer;
}
