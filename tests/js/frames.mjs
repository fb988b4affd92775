// Makes frames for tests, after docs/wire.md.

import { FRAME } from "../../static/js/wire.js";

export const words = (...values) => new Uint8Array(Uint32Array.from(values).buffer);

export function frame(type, payload = words(), fields = {}) {
  const { firstStep = 0, nSteps = 1, nItems = 0, overflow = 0, tMs = 0, flags = 0, version = 1 } = fields;
  const padded = Math.ceil(payload.length / 8) * 8;
  const out = new Uint8Array(32 + padded);
  const view = new DataView(out.buffer);
  view.setUint8(0, type);
  view.setUint8(1, flags);
  view.setUint16(2, version, true);
  view.setUint32(4, payload.length, true);
  view.setUint32(8, firstStep, true);
  view.setUint32(12, nSteps, true);
  view.setUint32(16, nItems, true);
  view.setUint32(20, overflow, true);
  view.setFloat64(24, tMs, true);
  out.set(payload, 32);
  return out;
}

export function hello({ session = "s1", status = "ready", model = "fake", blocks = null, blockSize = 16, protocol = 1, ...limits } = {}) {
  const config = blocks === null ? null : { num_blocks: blocks, block_size: blockSize, max_num_seqs: 8, max_num_batched_tokens: 64, ...limits };
  const body = { protocol, session, status, model, step: 0, config };
  return frame(FRAME.HELLO, new TextEncoder().encode(JSON.stringify(body)), { nItems: 1 });
}

export const keyframe = (step, cells) =>
  frame(FRAME.KEYFRAME, words(...cells), { firstStep: step, nItems: cells.length });

export const delta = (step, ...pairs) =>
  frame(FRAME.DELTA, words(...pairs), { firstStep: step, nItems: pairs.length / 2 });

/** Rows of steps first … first + count - 1, all zero but for the step number and t_ms = step. */
export function rows(first, count) {
  const payload = new Uint8Array(64 * count);
  const view = new DataView(payload.buffer);
  for (let i = 0; i < count; i++) {
    view.setUint32(64 * i, first + i, true);
    view.setFloat64(64 * i + 8, first + i, true);
  }
  return frame(FRAME.STEPS, payload, { firstStep: first, nSteps: count, nItems: count });
}

export const host = (step, ...counts) => frame(FRAME.HOST, words(...counts), { firstStep: step, nItems: 1 });

export const gap = (first, count) => frame(FRAME.GAP, words(), { firstStep: first, nSteps: count });

export function message(...frames) {
  const out = new Uint8Array(frames.reduce((sum, each) => sum + each.length, 0));
  frames.reduce((at, each) => (out.set(each, at), at + each.length), 0);
  return out.buffer;
}
