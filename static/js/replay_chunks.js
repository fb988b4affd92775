// A recorded session in pieces of 256 steps, fetched when wanted and kept for a while. The frames in them are those of
// the live view (docs/wire.md). No DOM: runs in node too.

import { FRAME, HEADER_BYTES, WireError } from "./wire.js";

export const CHUNK_STEPS = 256;
const MAX_CHUNKS = 64;
const MAX_BYTES = 64 * 2 ** 20;

/** First step of the chunk that holds `step`. */
export const chunkStart = (step) => Math.floor((Math.max(1, step) - 1) / CHUNK_STEPS) * CHUNK_STEPS + 1;

/** A chunk that could not be had. `fatal`: asking again cannot help. */
export class ChunkError extends Error {
  constructor(message, { fatal = false } = {}) {
    super(message);
    this.name = "ChunkError";
    this.fatal = fatal;
  }
}

/**
 * Cut a chunk into messages as the socket would have sent them: each has one picture, and whatever goes with it.
 * @param {ArrayBuffer} buffer
 * @returns {{step: number, tMs: number, buffer: ArrayBuffer}[]} `step`: the one that the picture shows, `tMs` its time
 */
export function splitMessages(buffer) {
  const view = new DataView(buffer);
  const parts = [];
  let part = null;
  for (let offset = 0; offset < buffer.byteLength; ) {
    if (offset + HEADER_BYTES > buffer.byteLength) throw new WireError("a frame header is cut short");
    const type = view.getUint8(offset);
    if (part === null || beginsMessage(type, part)) parts.push((part = { start: offset, step: -1, tMs: 0, hasRows: false }));
    if (isPicture(type)) Object.assign(part, { step: view.getUint32(offset + 8, true), tMs: view.getFloat64(offset + 24, true) });
    part.hasRows ||= type === FRAME.STEPS;
    offset += HEADER_BYTES + Math.ceil(view.getUint32(offset + 4, true) / 8) * 8;
    part.end = offset;
  }
  if (parts.some(({ step }) => step < 0)) throw new WireError("a message without a picture");
  // Copies, because frames are read as arrays that begin at the start of their buffer.
  return parts.map(({ start, end, step, tMs }) => ({ step, tMs, buffer: buffer.slice(start, end) }));
}

const isPicture = (type) => type === FRAME.KEYFRAME || type === FRAME.DELTA;

function beginsMessage(type, { step, hasRows }) {
  return type === FRAME.HELLO || (isPicture(type) && step >= 0) || (type === FRAME.GAP && hasRows);
}

/** One chunk: message 0 is the whole state before its first step, then one message for each recorded step. */
class Chunk {
  constructor(firstStep, buffer, isWhole) {
    this.firstStep = firstStep;
    this.messages = splitMessages(buffer);
    if (this.messages.length === 0) throw new WireError("an empty chunk");
    this.lastStep = this.messages.at(-1).step;
    this.numBytes = buffer.byteLength;
    this.isWhole = isWhole;
  }

  /** Messages of the steps after `after` up to `last`. */
  between(after, last) {
    return this.messages.filter(({ step }) => step > after && step <= last);
  }
}

/** Fetches chunks of one session; the least recently used ones are let go. */
export class ChunkStore {
  #chunks = new Map(); // in the order of use
  #loading = new Map();

  /**
   * @param {string} session id
   * @param {{fetch?: Function, maxChunks?: number, maxBytes?: number}} options
   */
  constructor(session, { fetch = (...request) => globalThis.fetch(...request), maxChunks = MAX_CHUNKS, maxBytes = MAX_BYTES } = {}) {
    this.session = session;
    this.fetch = fetch;
    this.maxChunks = maxChunks;
    this.maxBytes = maxBytes;
  }

  /** The chunk, if it is here and reaches to `lastStep`. */
  peek(firstStep, lastStep = firstStep) {
    const chunk = this.#chunks.get(firstStep);
    if (!chunk) return null;
    this.#chunks.delete(firstStep);
    this.#chunks.set(firstStep, chunk);
    return chunk.isWhole || chunk.lastStep >= lastStep ? chunk : null;
  }

  /** The chunk, fetched if need be; throws ChunkError or WireError. A running session's newest chunk grows. */
  async get(firstStep, lastStep = firstStep) {
    const known = this.peek(firstStep, lastStep);
    if (known) return known;
    let loading = this.#loading.get(firstStep);
    if (!loading) {
      loading = this.#load(firstStep).finally(() => this.#loading.delete(firstStep));
      this.#loading.set(firstStep, loading);
    }
    return loading;
  }

  async #load(firstStep) {
    const response = await this.#ask(firstStep);
    if (!response.ok) {
      throw new ChunkError(await describeRefusal(response), { fatal: response.status >= 400 && response.status < 500 });
    }
    const isWhole = /immutable/.test(response.headers.get("cache-control") ?? "");
    const chunk = new Chunk(firstStep, await response.arrayBuffer(), isWhole);
    this.#chunks.delete(firstStep);
    this.#chunks.set(firstStep, chunk);
    this.#trim();
    return chunk;
  }

  async #ask(firstStep) {
    try {
      return await this.fetch(`/api/sessions/${encodeURIComponent(this.session)}/chunks/${firstStep}`);
    } catch {
      throw new ChunkError("the server does not answer");
    }
  }

  #trim() {
    let bytes = 0;
    for (const { numBytes } of this.#chunks.values()) bytes += numBytes;
    for (const [firstStep, { numBytes }] of this.#chunks) {
      if (this.#chunks.size <= 1 || (this.#chunks.size <= this.maxChunks && bytes <= this.maxBytes)) return;
      this.#chunks.delete(firstStep);
      bytes -= numBytes;
    }
  }
}

/** What a server says in a problem-details answer, in a few words. */
export async function describeRefusal(response) {
  try {
    return (await response.json()).detail || `error ${response.status}`;
  } catch {
    return `error ${response.status}`;
  }
}
