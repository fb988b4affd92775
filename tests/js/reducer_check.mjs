// static/js/reducer.js, step_ring.js and wire.js on hand-made frames.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import test from "node:test";
import { deflateRawSync } from "node:zlib";

import { EngineView } from "../../static/js/reducer.js";
import { StepRing } from "../../static/js/step_ring.js";
import { FRAME, NO_SLOT, STATE, WireError, cellAux, cellHashed, cellSlot, cellState } from "../../static/js/wire.js";
import { delta, frame, gap, hello, host, keyframe, message, rows, words } from "./frames.mjs";

async function opened(step = 1) {
  const view = new EngineView({ clock: () => 42 });
  await view.apply(message(hello({ blocks: 3 }), keyframe(step, [10, 11, 12]), rows(step, 1)));
  return view;
}

async function refuses(view, buffer, pattern) {
  // All plain fields, and a digest of every array: written out, the ring's columns would be megabytes.
  const digest = (name, value) =>
    ArrayBuffer.isView(value) ? createHash("sha256").update(value).digest("hex") : value;
  const state = () => JSON.stringify([view, view.steps.total], digest);
  const before = state();
  await assert.rejects(view.apply(buffer), (error) => error instanceof WireError && pattern.test(error.message));
  assert.equal(state(), before);
}

test("a packed cell is read to its last bit", () => {
  const cell = 0xffff_ff_13 >>> 0;
  assert.equal(cellState(cell), STATE.TAIL);
  assert.equal(cellHashed(cell), true);
  assert.equal(cellAux(cell), 255);
  assert.equal(cellSlot(cell), NO_SLOT);
  assert.equal(cellHashed(0x0002_01_02), false);
  assert.equal(cellSlot(0x0002_01_02), 2);
});

test("while the model loads there are no blocks, then a picture", async () => {
  const view = new EngineView();
  assert.deepEqual(await view.apply(message(hello({ status: "loading" }))), { lastStep: -1, changed: null, hello: true });
  assert.deepEqual([view.status, view.numBlocks, view.step], ["loading", 0, -1]);
  assert.deepEqual((await view.apply(message(hello({ status: "failed" })))).changed, new Uint32Array(0));
  const change = await view.apply(message(hello({ blocks: 2 }), keyframe(0, [1, 2])));
  assert.deepEqual([view.status, view.numBlocks, view.blockSize, view.step], ["ready", 2, 16, 0]);
  assert.equal(change.changed, null);
  assert.equal(change.hello, true);
});

test("the server's clock goes on from what the newest HELLO said", async () => {
  let now = 1000;
  const view = new EngineView({ clock: () => now });
  const greeting = hello();
  new DataView(greeting.buffer).setFloat64(24, 5_000_000, true);
  await view.apply(message(greeting));
  now += 250;
  assert.equal(view.serverMs, 5_000_250);
});

test("a delta changes its blocks and no other, and says which", async () => {
  const view = await opened();
  const change = await view.apply(message(delta(2, 2, 77)));
  assert.deepEqual([...view.cells], [10, 11, 77]);
  assert.deepEqual(change, { lastStep: 2, changed: Uint32Array.of(2), hello: false });
});

test("batch, marks and gaps are kept", async () => {
  const view = await opened();
  const batch = new Uint8Array(12);
  new DataView(batch.buffer).setUint16(0, 5, true);
  new DataView(batch.buffer).setUint8(2, 1);
  new DataView(batch.buffer).setUint32(4, 9, true);
  new DataView(batch.buffer).setUint32(8, 70000, true);
  const mark = new Uint8Array(16);
  new DataView(mark.buffer).setUint32(0, 6, true);
  new DataView(mark.buffer).setUint8(4, 3);
  new DataView(mark.buffer).setUint8(5, 1);
  new DataView(mark.buffer).setUint16(6, 2, true);
  new DataView(mark.buffer).setUint32(8, 1, true);
  new DataView(mark.buffer).setUint32(12, 0xffffffff, true);
  await view.apply(message(
    delta(6), gap(2, 3), rows(5, 2), frame(FRAME.BATCH, batch, { firstStep: 6, nItems: 1 }),
    frame(FRAME.MARKS, mark, { firstStep: 6, nItems: 1, overflow: 4 }),
  ));
  assert.deepEqual(view.batch, { step: 6, entries: [{ slot: 5, kind: 1, tokens: 9, seqId: 70000 }] });
  assert.deepEqual(view.marks, [{ step: 6, kind: 3, detail: 1, slot: 2, blockId: 1, seqId: 0xffffffff, at: 42, live: true }]);
  assert.equal(view.marksLost, 4);
  assert.deepEqual(view.gaps, [{ firstStep: 2, nSteps: 3 }]);
  assert.equal(view.rowsLost, 3);
  assert.deepEqual([view.steps.length, view.steps.lastStep], [3, 6]);
});

test("the host tier is what its newest frame says, and none before the first", async () => {
  const view = await opened();
  assert.equal(view.host, null);
  await view.apply(message(delta(2), host(2, 40, 12, 5, 1)));
  assert.deepEqual(view.host, { total: 40, used: 12, pinned: 5, loading: 1 });
  await view.apply(message(delta(3)));
  assert.equal(view.host.used, 12, "it stays until it changes");
  view.reset();
  assert.equal(view.host, null);
});

test("a host tier that does not add up is refused with its whole message", async () => {
  const view = await opened();
  await refuses(view, message(delta(2, 2, 77), host(2, 40, 41, 0, 0)), /host tier of 40/);
  await refuses(view, message(delta(2, 2, 77), host(2, 40, 4, 5, 0)), /5 pinned/);
  await refuses(view, message(delta(2), frame(FRAME.HOST, words(1, 2, 3), { nItems: 1 })), /4 words announced/);
  await refuses(view, message(delta(2), frame(FRAME.HOST, words(), { nItems: 0 })), /0 host tiers/);
});

test("marks, gaps and rows are bounded", async () => {
  const view = new EngineView({ clock: () => 0, ringCapacity: 10 });
  await view.apply(message(hello({ blocks: 1 }), keyframe(0, [1])));
  for (let i = 0; i < 300; i++) {
    await view.apply(message(
      gap(4 * i + 1, 1), rows(4 * i + 2, 3), frame(FRAME.MARKS, new Uint8Array(16 * 20), { nItems: 20 }),
    ));
  }
  assert.equal(view.marks.length, 4096);
  assert.equal(view.marksTotal, 6000);
  assert.deepEqual([view.gaps.length, view.rowsLost], [256, 300]);
  assert.deepEqual([view.steps.length, view.steps.total, view.steps.lastStep], [10, 900, 1200 - 2 + 2]);
  assert.equal(view.steps.get("step", 9), 1200);
});

test("rows come once though they are sent again, and a hole without a gap is refused", async () => {
  const view = await opened(1);
  await view.apply(message(hello({ blocks: 3 }), keyframe(3, [1, 2, 3]), rows(1, 3)));
  assert.deepEqual([view.steps.length, view.steps.lastStep], [3, 3]);
  await refuses(view, message(delta(9), rows(9, 1)), /without a gap/);
});

test("another run of the server starts afresh", async () => {
  const view = await opened(50);
  await view.apply(message(hello({ session: "s2", blocks: 1 }), keyframe(2, [9]), rows(1, 2)));
  assert.deepEqual([view.session, view.numBlocks, view.step, view.steps.length], ["s2", 1, 2, 2]);
  assert.deepEqual([...view.cells], [9]);
});

test("the same run keeps its rows over a reconnect", async () => {
  const view = await opened(1);
  const change = await view.apply(message(hello({ blocks: 3 }), keyframe(2, [1, 2, 3]), rows(2, 1)));
  assert.equal(change.changed, null);
  assert.equal(view.steps.length, 2);
});

test("a damaged message is refused and changes nothing", async () => {
  const view = await opened();
  await refuses(view, message(keyframe(2, [5, 5])), /keyframe of 2 for 3/);
  await refuses(view, message(keyframe(2, [5, 5, 5]), delta(2, 3, 1)), /block 3 of 3/);
  await refuses(view, message(delta(2, 0, 1)).slice(0, 20), /header is cut short/);
  await refuses(view, message(rows(2, 1)).slice(0, 64), /frame is cut short/);
  await refuses(view, message(frame(FRAME.DELTA, words(1), { nItems: 1 })), /announced/);
  await refuses(view, message(frame(FRAME.STEPS, words(1, 2), { nItems: 1 })), /announced/);
  await refuses(view, message(frame(FRAME.HELLO, words(1))), /not JSON/);
  await refuses(view, message(frame(FRAME.DELTA, words(), { version: 2 })), /version 2/);
  await refuses(view, message(hello({ blocks: 3, protocol: 9 })), /protocol 9/);
  await refuses(view, message(frame(FRAME.KEYFRAME, words(1, 2), { nItems: 3, flags: 1 })), /damaged|holds/);
  const many = deflateRawSync(Buffer.alloc(1000));
  await refuses(view, message(frame(FRAME.KEYFRAME, many, { nItems: 3, flags: 1 })), /damaged/);
  const few = deflateRawSync(Buffer.alloc(8));
  await refuses(view, message(frame(FRAME.KEYFRAME, few, { nItems: 3, flags: 1 })), /holds 8 bytes, not 12/);
  await refuses(new EngineView(), message(delta(1)), /before the first picture/);
});

test("a HELLO that makes no sense is refused before it changes anything", async () => {
  const view = await opened();
  for (const blocks of [-1, 0, 1e12, 2 ** 24 + 1, "x", 1.5, true, {}]) {
    await refuses(view, message(hello({ session: "s2", blocks })), /num_blocks is/);
    await refuses(view, message(hello({ blocks }), keyframe(2, [1])), /num_blocks is/);
  }
  for (const blockSize of [0, 257, null, "16"]) await refuses(view, message(hello({ session: "s2", blocks: 3, blockSize })), /block_size is/);
  for (const limits of [{ max_num_seqs: 1e9 }, { max_num_batched_tokens: 0 }]) {
    await refuses(view, message(hello({ session: "s2", blocks: 3, ...limits })), /max_num_\w+ is/);
  }
  for (const names of [{ session: "" }, { session: 7 }, { status: null }, { model: 5 }]) {
    await refuses(view, message(hello({ blocks: 3, ...names })), /lacks a name/);
  }
  for (const body of ["null", "7", "[]", '{"protocol":1}']) {
    await refuses(view, message(frame(FRAME.HELLO, new TextEncoder().encode(body), { nItems: 1 })), /protocol|lacks a name/);
  }
  await refuses(view, message(frame(FRAME.HELLO, new TextEncoder().encode('{"protocol":1,"session":"a","status":"b","model":null}'))), /num_blocks is/);
});

test("frame types of the future are skipped", async () => {
  const view = await opened();
  await view.apply(message(frame(99, words(1, 2, 3)), delta(2, 0, 5)));
  assert.equal(view.cells[0], 5);
});

test("the ring finds steps, over its seam too", () => {
  const ring = new StepRing(5);
  assert.deepEqual([ring.lastStep, ring.find(3), ring.length], [-1, 0, 0]);
  const view = new DataView(new ArrayBuffer(64));
  for (const step of [1, 2, 3, 7, 8, 9, 10]) {
    view.setUint32(0, step, true);
    view.setFloat32(20, step / 2, true);
    ring.push(view, 0);
  }
  assert.deepEqual([ring.length, ring.total, ring.lastStep], [5, 7, 10]);
  assert.deepEqual([0, 1, 2, 3, 4].map((i) => ring.get("step", i)), [3, 7, 8, 9, 10]);
  assert.deepEqual([2, 3, 5, 7, 10, 11].map((step) => ring.find(step)), [0, 0, 1, 1, 4, 5]);
  assert.equal(ring.row(4).forwardMs, 5);
  assert.equal(ring.row(4).hitBlocks, 0);
});
