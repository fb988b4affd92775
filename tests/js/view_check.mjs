// The parts of the live view that need no browser: geometry, colours, chart columns, words.

import assert from "node:assert/strict";
import test from "node:test";

import { BlockGrid } from "../../static/js/block_grid.js";
import { glyphMetrics, bodyPoint, tailFill } from "../../static/js/block_glyphs.js";
import { describeOutage } from "../../static/js/connection.js";
import { formatMs, formatPercent, formatSpan } from "../../static/js/format.js";
import { describeBlock } from "../../static/js/grid_input.js";
import { GridLayout, fitCells } from "../../static/js/grid_layout.js";
import { bindKey, bindKeys } from "../../static/js/keyboard.js";
import { MarkCursor } from "../../static/js/mark_cursor.js";
import { blockRgb, buildTable, contrast, inkOn, mix, parseHex, slotRgb } from "../../static/js/palette.js";
import {
  countReasons, countStates, describeView, engineMeans, enginePlace, stepRates, tokenRates,
} from "../../static/js/status_bar.js";
import { StepBins } from "../../static/js/step_bins.js";
import { nextTheme } from "../../static/js/theme.js";
import { newestPreemption } from "../../static/js/drawer.js";
import { replaces } from "../../static/js/grid_marks.js";
import { changesOf, describeProblem } from "../../static/js/policies.js";
import { ROW_POLICIES, ROW_RESET, ROW_SWAPPED_OUT, StepRing } from "../../static/js/step_ring.js";
import { TRACKS, happened } from "../../static/js/timeline_tracks.js";
import { MARK, NO_SLOT, STATE } from "../../static/js/wire.js";

const pack = (state, aux = 0, slot = NO_SLOT) => ((slot << 16) | (aux << 8) | state) >>> 0;
const GRIDS = { dark: parseHex("#0c1118"), light: parseHex("#ffffff") };

function makeRing(rows, capacity = 65536) {
  const ring = new StepRing(capacity);
  for (const row of rows) {
    const view = new DataView(new ArrayBuffer(64));
    view.setUint32(0, row.step, true);
    view.setUint8(4, row.kind ?? 0);
    view.setUint8(5, row.stopReason ?? 0);
    view.setUint16(6, row.flags ?? 0, true);
    view.setFloat64(8, row.tMs ?? row.step * 10, true);
    view.setFloat32(20, row.forwardMs ?? 1, true);
    view.setUint32(32, row.prefillTokens ?? 0, true);
    view.setUint32(36, row.decodeTokens ?? 0, true);
    view.setUint32(48, row.free ?? 10, true);
    view.setUint32(52, row.cached ?? 0, true);
    view.setUint16(56, row.preemptions ?? 0, true);
    ring.push(view, 0);
  }
  return ring;
}

function makeLayout({ numBlocks = 100, width = 640, height = 320, ratio = 1, gutter = 30 } = {}) {
  const layout = new GridLayout();
  layout.resize(width, height, ratio, gutter);
  layout.setBlocks(numBlocks);
  return layout;
}

test("every pool fits into every area, and every block lies inside it", () => {
  for (const numBlocks of [1, 2, 7, 64, 100, 1024, 1456, 9973, 100_000, 1_000_000]) {
    for (const [width, height] of [[280, 300], [900, 400], [1800, 1000], [50, 700]]) {
      const { cell, cols } = fitCells(numBlocks, width, height, 40);
      const rows = Math.ceil(numBlocks / cols);
      assert.ok(cols * cell <= width + 1e-6, `${numBlocks} in ${width}: ${cols} × ${cell}`);
      assert.ok(rows * cell <= height + 1e-6, `${numBlocks} in ${height}: ${rows} × ${cell}`);
    }
  }
});

test("a block is found where it is drawn, at any zoom and pan", () => {
  const layout = makeLayout({ numBlocks: 500 });
  for (const [x, y, factor] of [[0, 0, 1], [400, 200, 3], [639, 319, 5], [200, 10, 0.5]]) {
    layout.zoomAt(x, y, factor);
    for (const id of [0, 1, 57, 123, 499]) {
      const { x: left, y: top } = layout.origin(id);
      if (left < layout.gutter || top < 0 || left >= layout.width || top >= layout.height) continue;
      assert.equal(layout.blockAt(left, top), id);
      assert.equal(layout.blockAt(left + layout.cell - 1, top + layout.cell - 1), id);
    }
  }
});

test("what is under the pointer stays under it while zooming in", () => {
  const layout = makeLayout({ numBlocks: 2000, width: 900, height: 400 });
  const id = layout.blockAt(300, 60);
  const { x, y } = layout.origin(id);
  const [midX, midY] = [x + layout.cell / 2, y + layout.cell / 2];
  for (let i = 0; i < 6; i++) layout.zoomAt(midX, midY, 1.3);
  assert.equal(layout.blockAt(midX, midY), id);
});

test("beyond the last block and in the gutter there is no block", () => {
  const layout = makeLayout({ numBlocks: 5 });
  assert.equal(layout.blockAt(layout.gutter - 1, 0), -1);
  assert.equal(layout.blockAt(layout.gutter + 5 * layout.cell, 0), -1);
  assert.equal(layout.blockAt(layout.gutter, layout.height - 1), -1);
});

test("a revealed block is in view", () => {
  const layout = makeLayout({ numBlocks: 2000 });
  layout.zoomAt(30, 0, 12);
  for (const id of [1999, 0, 777]) {
    layout.reveal(id);
    const { x, y } = layout.origin(id);
    assert.ok(x >= layout.gutter && y >= 0 && x + layout.cell <= layout.width && y + layout.cell <= layout.height);
  }
});

test("the pixel to read lies in the filled part of a tail, off the hatch and off the border", () => {
  for (const ratio of [1, 1.5, 2]) {
    for (let numBlocks = 20; numBlocks < 4000; numBlocks = Math.round(numBlocks * 1.4)) {
      const metrics = glyphMetrics(makeLayout({ numBlocks, width: 800 * ratio, height: 400 * ratio, ratio }));
      if (!metrics.hasGlyphs) continue;
      assert.ok(bodyPoint(STATE.TAIL, metrics).y >= metrics.box - tailFill(1, 16, metrics));
      const cached = bodyPoint(STATE.CACHED, metrics);
      assert.ok((cached.x + cached.y) % metrics.hatchStep >= metrics.unit && cached.x < metrics.box);
      const shared = bodyPoint(STATE.SHARED, metrics);
      assert.ok(shared.y < metrics.box - metrics.border);
    }
  }
});

test("slots have colours of their own with enough contrast to the grid, in both themes", () => {
  for (const [name, grid] of Object.entries(GRIDS)) {
    const seen = new Set();
    for (let slot = 0; slot < 64; slot++) {
      const rgb = slotRgb(slot, name === "light");
      assert.ok(contrast(rgb, grid) >= 3, `slot ${slot} on ${name}: ${contrast(rgb, grid).toFixed(2)}`);
      seen.add(rgb.join());
    }
    assert.equal(seen.size, 64, name);
  }
  assert.deepEqual(slotRgb(0, false), parseHex("#e69f00"));
});

test("what is written on a block can be read, whatever its colour", () => {
  const shared = [parseHex("#6b3500"), parseHex("#f0e442")];
  const slots = [true, false].flatMap((light) => Array.from({ length: 64 }, (_, slot) => slotRgb(slot, light)));
  for (const rgb of [...shared, ...slots]) assert.ok(contrast(inkOn(rgb), rgb) >= 4.5, `${rgb}: ${contrast(inkOn(rgb), rgb).toFixed(2)}`);
});

test("the colour table agrees with the colour of each block and dims what is not selected", () => {
  const theme = { light: false, grid: [0, 0, 0], bad: [255, 0, 0], states: [[1, 1, 1], [40, 40, 40], [3, 3, 3], [4, 4, 4], [5, 5, 5], [6, 6, 6], [7, 7, 7]] };
  const unpack = (word) => [word & 255, (word >>> 8) & 255, (word >>> 16) & 255];
  for (const mode of ["state", "request"]) {
    const { table, shift, mask } = buildTable({ theme, mode, numSlots: 8 });
    for (let state = 0; state < 7; state++) {
      for (const slot of [0, 7, NO_SLOT]) {
        assert.deepEqual(unpack(table[(state << shift) | (slot & mask)]), blockRgb(theme, mode, state, slot));
      }
    }
  }
  const { table, shift } = buildTable({ theme, mode: "request", numSlots: 8, selectedSlot: 2 });
  const at = (state, slot) => unpack(table[(state << shift) | slot]);
  assert.deepEqual(at(STATE.ACTIVE, 2), slotRgb(2, false));
  assert.deepEqual(at(STATE.ACTIVE, 3), mix(slotRgb(3, false), theme.grid, 0.78));
  assert.notDeepEqual(at(STATE.CACHED, 2), blockRgb(theme, "request", STATE.CACHED, 2)); // its slot is somebody else's now
});

test("columns keep the highest step and sum up events", () => {
  const bins = new StepBins(4);
  const ring = makeRing([
    { step: 4, decodeTokens: 3, free: 6, preemptions: 1 },
    { step: 5, prefillTokens: 40, decodeTokens: 2, free: 2, cached: 3, preemptions: 2, forwardMs: 9 },
    { step: 7, decodeTokens: 5, free: 4 },
    { step: 8, decodeTokens: 1 },
  ]);
  bins.update(ring, 10);
  const at = bins.at(1);
  assert.equal(bins.step[at], 5);
  assert.equal(bins.prefillTokens[at] + bins.decodeTokens[at], 42);
  assert.equal(bins.used[at], 6);
  assert.equal(bins.preemptions[at], 3);
  assert.equal(bins.stepMs[at], 9);
  assert.ok(!bins.has(0) && bins.has(2) && !bins.has(3));
});

test("columns come out the same whether rows come one by one or all at once", () => {
  const rows = Array.from({ length: 500 }, (_, i) => ({ step: i + 1 + (i > 200 ? 30 : 0), decodeTokens: i % 17, free: i % 11 }));
  const whole = new StepBins(8);
  whole.update(makeRing(rows), 10);
  const pieces = new StepBins(8);
  const ring = makeRing([]);
  rows.forEach((row) => {
    const one = makeRing([row]);
    const view = new DataView(new ArrayBuffer(64));
    view.setUint32(0, row.step, true);
    view.setFloat64(8, one.get("tMs", 0), true);
    view.setFloat32(20, 1, true);
    view.setUint32(36, row.decodeTokens, true);
    view.setUint32(48, row.free, true);
    ring.push(view, 0);
    pieces.update(ring, 10);
  });
  for (let column = whole.first; column < whole.end; column++) {
    assert.equal(whole.has(column), pieces.has(column));
    for (const name of ["step", "used", "decodeTokens", "stepMs"]) {
      assert.equal(whole[name][whole.at(column)], pieces[name][pieces.at(column)], `${name} of ${column}`);
    }
  }
});

test("idle time is seen, a long step is not idle time", () => {
  const bins = new StepBins(1);
  bins.update(makeRing([{ step: 1, tMs: 1000, forwardMs: 3000 }, { step: 2, tMs: 4010 }, { step: 3, tMs: 46_000 }]), 10);
  assert.equal(bins.idleMs[bins.at(2)], 0);
  assert.ok(bins.idleMs[bins.at(3)] > 41_000);
});

test("time that passes in lost rows is not idle time", () => {
  for (const width of [1, 4]) {
    const bins = new StepBins(width);
    const ring = makeRing([{ step: 10, tMs: 1000 }]);
    bins.update(ring, 10);
    // Steps 11 to 30 are lost; the ring then holds a row that slept, and one after it.
    for (const row of [{ step: 31, tMs: 61_000 }, { step: 32, tMs: 64_000 }, { step: 33, tMs: 64_002 }]) {
      const view = new DataView(new ArrayBuffer(64));
      view.setUint32(0, row.step, true);
      view.setFloat64(8, row.tMs, true);
      ring.push(view, 0);
    }
    bins.update(ring, 10);
    const sum = (step) => bins.idleMs[bins.at(Math.floor(step / width))];
    assert.equal(sum(31), width === 1 ? 0 : sum(28), "the lost rows");
    assert.equal(sum(32), 3000);
  }
});

test("a reset is told by its own flag", () => {
  const bins = new StepBins(1);
  bins.update(makeRing([{ step: 1, flags: ROW_RESET }, { step: 2, flags: ROW_RESET << 1 }]), 10);
  assert.deepEqual([1, 2].map((step) => bins.flags[bins.at(step)] & ROW_RESET), [ROW_RESET, 0]);
});

test("swaps are told from preemptions that throw everything away", () => {
  const bins = new StepBins(2);
  bins.update(makeRing([
    { step: 2, preemptions: 3, flags: (2 << 8) | ROW_SWAPPED_OUT },
    { step: 3, preemptions: 1, flags: 1 << 8 },
    { step: 4, preemptions: 1, flags: ROW_POLICIES },
  ]), 10);
  const signs = (column) => happened(bins.at(column), bins).map(({ sign }) => sign);
  assert.deepEqual([bins.preemptions[bins.at(1)], bins.swaps[bins.at(1)]], [4, 3]);
  assert.deepEqual(signs(1), ["▼", "⇅", "↑"]);
  assert.deepEqual(signs(2), ["▼", "⚙"]);
  const events = TRACKS.at(-1);
  assert.equal(events.words(bins.at(1), { bins }), "1 preempted, to be computed again, 3 preempted, swapped out, copies to the host tier");
  assert.equal(events.text(bins.at(2), { bins }), "▼ 1  ⚙");
});

test("the tracks of the timeline share its height", () => {
  assert.ok(Math.abs(TRACKS.reduce((sum, { share }) => sum + share, 0) - 1) < 1e-9);
});

test("of what happened to a block in one step the more telling mark is shown", () => {
  const at = (step, kind) => ({ step, kind });
  assert.ok(replaces(at(1, MARK.ALLOCATE), undefined));
  assert.ok(!replaces(at(1, MARK.ALLOCATE), at(1, MARK.EVICT)));
  assert.ok(!replaces(at(1, MARK.FREED_BY_PREEMPTION), at(1, MARK.SWAP_OUT)));
  assert.ok(replaces(at(1, MARK.SWAP_IN), at(1, MARK.ALLOCATE)));
  assert.ok(replaces(at(2, MARK.ALLOCATE), at(1, MARK.SWAP_OUT)));
});

test("the newest preemption is the last one in the rows", () => {
  assert.equal(newestPreemption(makeRing([])), -1);
  assert.equal(newestPreemption(makeRing([{ step: 1, preemptions: 1 }, { step: 2, preemptions: 2 }, { step: 3 }])), 2);
});

test("only what a person has changed is sent, and only if it is not in force", () => {
  const selects = [{ name: "policy", value: "priority" }, { name: "preemption", value: "newest-first" }];
  const now = { policy: "fcfs", preemption: "oldest-first" };
  assert.deepEqual(changesOf(selects, new Set(["policy"]), now), { policy: "priority" });
  assert.deepEqual(changesOf(selects, new Set(), now), {});
  assert.deepEqual(changesOf(selects, new Set(["policy"]), { ...now, policy: "priority" }), {});
});

test("a pixel read where the canvas shows nothing is not the one read before", () => {
  const probe = {
    data: [0, 0, 0, 0],
    clearRect: () => (probe.data = [0, 0, 0, 0]),
    drawImage: (source) => (probe.data = source.shows ?? probe.data),
    getImageData: () => ({ data: probe.data }),
  };
  const grid = { layout: makeLayout(), view: { cells: new Uint32Array(100) }, probe, canvas: { shows: [9, 8, 7, 255] } };
  assert.deepEqual(BlockGrid.prototype.pixel.call(grid, 3), [9, 8, 7]);
  grid.canvas = {};
  assert.deepEqual(BlockGrid.prototype.pixel.call(grid, 3), [0, 0, 0]);
});

test("a refusal is told in the words of the server", () => {
  assert.equal(describeProblem(400, '{"detail": "policy is 3"}'), "policy is 3");
  assert.equal(describeProblem(400, '{"error": {"message": "no"}}'), "no");
  assert.equal(describeProblem(502, "<html>"), "The server answered with error 502.");
  assert.equal(describeProblem(0, ""), "The server does not answer.");
});

test("a jump in steps longer than the columns held starts afresh", () => {
  const bins = new StepBins(1);
  bins.update(makeRing([{ step: 1 }, { step: 1_000_000 }]), 10);
  assert.ok(bins.has(1_000_000));
  assert.ok(!bins.has(1));
});

test("a share says 0% of nothing and 100% of everything alone", () => {
  const shares = [[0, 96], [1, 1000], [5, 1000], [1, 8], [999, 1000], [1000, 1000]];
  assert.deepEqual(shares.map(([part, whole]) => formatPercent(part, whole)), ["0%", "<1%", "1%", "13%", ">99%", "100%"]);
});

test("the rate of one step is that of its own time", () => {
  const ring = makeRing([{ step: 1, decodeTokens: 9 }, { step: 2, prefillTokens: 64, decodeTokens: 2, forwardMs: 20 }]);
  const { prefill, decode } = stepRates(ring);
  assert.deepEqual([Math.round(prefill), Math.round(decode)], [3200, 100]);
  assert.deepEqual(stepRates(makeRing([])), { prefill: 0, decode: 0 });
});

test("token rates count whole steps, and end when steps do", () => {
  const ring = makeRing(Array.from({ length: 11 }, (_, i) => ({ step: i + 1, tMs: 1000 + i * 100, prefillTokens: 5, decodeTokens: 1 })));
  const rates = tokenRates(ring, 2500);
  assert.equal(Math.round(rates.prefill), 50);
  assert.equal(Math.round(rates.decode), 10);
  assert.deepEqual(tokenRates(ring, 2000 + 1 + 2001), { prefill: 0, decode: 0 }, "its clock says that it is over");
  assert.ok(tokenRates(ring, 2000 + 1 + 1999).decode > 0);
});

test("reasons are those of the newest 200 scheduling steps", () => {
  const rows = Array.from({ length: 300 }, (_, i) => ({ step: i + 1, kind: i === 299 ? 1 : 0, stopReason: i < 150 ? 1 : 3 }));
  const { counts, newest, numSteps } = countReasons(makeRing(rows));
  assert.equal(numSteps, 200);
  assert.equal(newest, 3);
  assert.deepEqual([counts[1], counts[3]], [51, 149]);
});

test("blocks are counted by state and put into words", () => {
  const view = { numBlocks: 5, blockSize: 16, cells: Uint32Array.of(pack(STATE.FREE), pack(STATE.TAIL, 9, 3), pack(STATE.SHARED, 4, 0), pack(STATE.CACHED, 0, 2), pack(STATE.RESERVED, 1, 3)) };
  assert.deepEqual(countStates(view), [1, 1, 0, 1, 1, 1, 0]);
  const nameOf = (slot) => (slot === 3 ? "4f2a" : "");
  assert.equal(describeBlock(view, 0, nameOf), "Block 0: free");
  assert.equal(describeBlock(view, 1, nameOf), "Block 1: tail, 9 of 16 tokens, 4f2a in slot 3");
  assert.equal(describeBlock(view, 2, nameOf), "Block 2: shared, 4 holders, oldest: request in slot 0");
  assert.equal(describeBlock(view, 3, nameOf), "Block 3: cached, last held in slot 2");
  assert.equal(describeBlock(view, 4, nameOf), "Block 4: reserved, still empty, 4f2a in slot 3");
});

test("marks are read once each, and a new epoch starts over however many it has", () => {
  const cursor = new MarkCursor();
  const take = (epoch, marks, marksTotal) => cursor.take({ epoch, marks, marksTotal });
  assert.deepEqual(take(1, [1, 2], 2), [1, 2]);
  assert.deepEqual(take(1, [1, 2], 2), []);
  assert.deepEqual(take(1, [2, 3], 3), [3]);
  assert.deepEqual(take(1, [8, 9], 9), [8, 9]);
  assert.deepEqual(take(2, [7], 1), [7]);
  assert.deepEqual(take(3, [4], 1), [4]);
  assert.deepEqual(take(4, [5, 6], 2), [5, 6]);
});

test("the view's figure says who watches, how fast, and what was lost", () => {
  const pace = { stepsPerFrame: 2.5, limitText: "at most 30 frames/s", numWatching: 3 };
  assert.deepEqual(describeView(pace, { rowsLost: 0, marksLost: 0 }), { pace: "2.5 steps/frame, at most 30 frames/s, 3 watching", lost: "" });
  const quiet = { stepsPerFrame: 0, limitText: "", numWatching: 1 };
  assert.deepEqual(describeView(quiet, { rowsLost: 1, marksLost: 0 }), { pace: "1 watching", lost: "lost: 1 step" });
  assert.equal(describeView(quiet, { rowsLost: 12, marksLost: 1 }).lost, "lost: 12 steps, 1 mark");
  assert.equal(describeView({ ...quiet, numWatching: 0 }, { rowsLost: 0, marksLost: 0 }).pace, "");
});

test("the banner says why there is no connection, and what comes next", () => {
  const status = { since: 0, refused: false, reason: "", retryAt: 9000 };
  assert.equal(describeOutage({ step: 12 }, status, 5000), "Disconnected for 5 s, the picture is that of step 12, next try in 4 s.");
  const full = { ...status, reason: "64 pages are watching already" };
  assert.equal(describeOutage({ step: -1 }, full, 5000), "Disconnected for 5 s, 64 pages are watching already, next try in 4 s.");
  const refused = { ...status, refused: true, retryAt: null, reason: "from is not a step number" };
  assert.equal(describeOutage({ step: -1 }, refused, 5000), "Disconnected for 5 s, not trying again: from is not a step number.");
});

/** A page that hears keys; `press` tells whether the key still does what it does by itself. */
function hearKeys(t, stored = null) {
  const heard = [];
  const closest = () => null;
  t.after(() => ["document", "localStorage"].forEach((name) => delete globalThis[name]));
  globalThis.document = { addEventListener: (_, listener) => heard.push(listener) };
  globalThis.localStorage = { getItem: () => stored, setItem() {} };
  return (code, { key = "x", target = { closest }, ...more } = {}) => {
    const event = { code, key, target, defaultPrevented: false, preventDefault() { this.defaultPrevented = true; }, ...more };
    for (const listener of heard) listener(event);
    return !event.defaultPrevented;
  };
}

test("a key that does something does nothing else", (t) => {
  const press = hearKeys(t);
  const done = [];
  const note = (name) => () => done.push(name);
  const toggle = { addEventListener() {} };
  bindKeys({ KeyB: note("b"), Space: note("space") }, { help: note("help"), escape() {}, toggle, steps: { Home: note("home") } });
  bindKey("KeyT", note("t"));
  assert.deepEqual(["KeyB", "Space", "Home", "KeyT"].map((code) => press(code)), [false, false, false, false]);
  assert.equal(press("Slash", { key: "?" }), false);
  assert.equal(press("KeyX"), true, "other keys are left alone");
  const field = { closest: () => ({}) };
  assert.deepEqual(["KeyB", "KeyT"].map((code) => press(code, { target: field })), [true, true], "a field has them for itself");
  assert.equal(press("KeyT", { ctrlKey: true }), true);
  assert.deepEqual(done, ["b", "space", "home", "t", "help"]);
});

test("the switch turns off single letters on every page", (t) => {
  const press = hearKeys(t, "off");
  bindKey("KeyT", () => assert.fail("it is off"));
  assert.equal(press("KeyT"), true);
});

test("themes follow each other, each once", () => {
  assert.deepEqual(["dark", "light", "system"].map(nextTheme), ["light", "system", "dark"]);
});

test("times are written in the unit that suits them", () => {
  assert.equal(formatMs(0.123), "0.12 ms");
  assert.equal(formatMs(12.34), "12.3 ms");
  assert.equal(formatMs(123.4), "123 ms");
  assert.equal(formatMs(1234), "1.23 s");
  assert.equal(formatSpan(42_000), "42 s");
  assert.equal(formatSpan(600_000), "10 min");
});

test("how the model is run reads as it does in Python (tests/unit/engine/test_engine_info.py)", () => {
  const describe = (engine) => [engineMeans(engine), enginePlace(engine)];
  const cuda = { device: "cuda", kernels: "torch", threads: 0, attention: "triton", tensor_parallel_size: 1 };
  assert.deepEqual(describe(cuda), ["torch · triton attention", "cuda"]);
  assert.deepEqual(describe({ ...cuda, tensor_parallel_size: 4 }), ["torch · triton attention", "4 cuda devices"]);
  const native = { ...cuda, device: "cpu", kernels: "avx2", threads: 1, attention: "native" };
  assert.deepEqual(describe(native), ["avx2", "1 thread"]);
  const pair = { ...native, kernels: "torch", attention: "reference", tensor_parallel_size: 2 };
  assert.deepEqual(describe(pair), ["torch · reference attention", "2 processes of 1 thread"]);
  const old = { device: "cpu", kernels: "torch", threads: 2 };
  assert.deepEqual(describe(old), ["torch", "2 threads"]);
  assert.deepEqual(describe({ ...old, attention: "", tensor_parallel_size: 1 }), ["torch", "2 threads"]);
});
