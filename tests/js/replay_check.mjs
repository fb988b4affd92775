// static/js/replay_stream.js and its neighbours on hand-made frames: what a person does, and what may go wrong.

import assert from "node:assert/strict";
import test from "node:test";

import { EngineView } from "../../static/js/reducer.js";
import { ChunkStore, chunkStart, splitMessages } from "../../static/js/replay_chunks.js";
import { shortId } from "../../static/js/replay_follow.js";
import { describeMarkers, findMarker, markerAt, wordMarkers } from "../../static/js/replay_markers.js";
import { ReplayStream } from "../../static/js/replay_stream.js";
import { FRAME } from "../../static/js/wire.js";
import { delta, frame, gap, hello, keyframe, message, rows, words } from "./frames.mjs";
import { pageStub, settled } from "./replay_page.mjs";

const LAST = 600;
const STEP_MS = 20;
const LONG_IDLE_AFTER = 300;

/** The session's clock: a step every 20 ms, and a minute of silence after step 300. */
const timeOf = (step) => step * STEP_MS + (step > LONG_IDLE_AFTER ? 60_000 : 0);

const at = (made, step) => {
  new DataView(made.buffer).setFloat64(24, timeOf(step), true);
  return made;
};

/** Each step writes its number into block 0. */
function chunk(first, last = Math.min(first + 255, LAST)) {
  const frames = [hello({ blocks: 2, status: "recorded" }), at(keyframe(first - 1, [first - 1, 0]), first - 1)];
  for (let step = first; step <= last; step++) frames.push(at(delta(step, 0, step), step), rows(step, 1));
  return message(...frames);
}

function setUp({ step = 1, respond = null, range = {} } = {}) {
  const asked = [];
  const fetch = async (url) => {
    const first = Number(url.split("/").pop());
    asked.push(first);
    return (respond && (await respond(first))) ?? new Response(chunk(first), { headers: { "cache-control": "private, immutable" } });
  };
  const page = pageStub(fetch);
  const view = new EngineView({ clock: () => 0 });
  const changes = [];
  const statuses = [];
  const plays = [];
  const stream = new ReplayStream(view, {
    session: "s1", step, env: page.env, range: { firstStep: 1, lastStep: LAST, isRunning: false, gaps: [], ...range },
    onchange: (change) => changes.push(change), onstatus: (status) => statuses.push(status), onplay: (playing) => plays.push(playing),
  });
  stream.start();
  return { view, stream, page, asked, changes, statuses, plays };
}

async function opened(options) {
  const all = setUp(options);
  await settled(all.stream);
  return all;
}

/** Let frames of 20 ms pass. */
async function play({ page, stream }, frames, ms = 20) {
  for (let i = 0; i < frames; i++) {
    page.frame(ms);
    await settled(stream);
  }
}

test("a chunk begins every 256 steps", () => {
  assert.deepEqual([0, 1, 256, 257, 512, 513].map(chunkStart), [1, 1, 1, 257, 257, 513]);
});

test("a chunk is cut into one message per picture, gaps with the picture after them", () => {
  const parts = [hello({ blocks: 1 }), keyframe(0, [1]), frame(FRAME.BATCH), delta(1), rows(1, 1), gap(2, 3), keyframe(4, [1]), keyframe(5, [2]), gap(5, 1), rows(6, 1)];
  const found = splitMessages(message(...parts));
  assert.deepEqual(found.map(({ step }) => step), [0, 1, 4, 5]);
  assert.equal(new DataView(found[2].buffer).getUint8(0), FRAME.GAP);
  assert.throws(() => splitMessages(message(hello({ blocks: 1 }), rows(1, 1))), /without a picture/);
  assert.throws(() => splitMessages(message(delta(1)).slice(0, 20)), /cut short/);
});

test("it begins where it is asked to and says so once", async () => {
  const { view, stream, changes, statuses } = await opened({ step: 300 });
  assert.equal(view.step, 300);
  assert.deepEqual([...view.cells], [300, 0]);
  assert.equal(view.steps.lastStep, 300);
  assert.equal(view.steps.get("step", 0), 1, "the timeline has the steps before");
  assert.ok(changes.some((change) => change.hello));
  assert.deepEqual(statuses.map(({ connected }) => connected), [true]);
  assert.equal(stream.wanted, 300);
});

test("of several seeks the newest counts", async () => {
  const all = await opened();
  for (const step of [500, 20, 400, 77]) all.stream.seek(step);
  await settled(all.stream);
  assert.deepEqual([all.view.step, all.view.cells[0], all.stream.wanted], [77, 77, 77]);
});

test("steps outside are the nearest inside, where 0 is what was before the first", async () => {
  const { view, stream } = await opened();
  for (const [step, reached] of [[9999, LAST], [-4, 0], [1, 1], [12.4, 12], [0, 0]]) {
    stream.seek(step);
    await settled(stream);
    assert.equal(view.step, reached);
  }
});

test("a small step forward changes few blocks and flashes only its own marks", async () => {
  const all = await opened({ step: 10 });
  all.changes.length = 0;
  all.stream.stepBy(1);
  await settled(all.stream);
  assert.deepEqual(all.changes, [{ lastStep: 11, changed: Uint32Array.of(0), hello: false }]);
});

test("chunks come once, and while the slider is dragged only the one that is needed", async () => {
  const all = await opened({ step: 1 });
  assert.deepEqual(all.asked, [1, 257], "the next one is fetched ahead");
  all.stream.seek(600, { dragging: true });
  await settled(all.stream);
  assert.deepEqual(all.asked, [1, 257, 513]);
  all.stream.seek(300);
  await settled(all.stream);
  assert.deepEqual(all.asked, [1, 257, 513]);
});

test("it plays at the engine's pace, with long silence shortened", async () => {
  const all = await opened({ step: 290 });
  all.stream.play();
  await play(all, 6); // the first frame only starts the clock
  assert.equal(all.view.step, 295);
  all.stream.speed = 2;
  await play(all, 5);
  assert.equal(all.view.step, 300, "step 301 is more than a second away");
  await play(all, 20);
  assert.equal(all.view.step, 300);
  await play(all, 10);
  assert.ok(all.view.step > 300 && all.view.step < 320);
  assert.deepEqual(all.plays, [true]);
});

test("it plays steadily, ten steps a second", async () => {
  const all = await opened({ step: 1 });
  all.stream.pace = "steady";
  all.stream.play();
  await play(all, 51);
  assert.equal(all.view.step, 11);
  all.stream.pause();
  await play(all, 20);
  assert.equal(all.view.step, 11);
});

test("a page that slept goes on where it was", async () => {
  const all = await opened({ step: 1 });
  all.stream.play();
  await play(all, 1);
  await play(all, 1, 3_600_000);
  assert.ok(all.view.step <= 14);
});

test("it stops at the end, and begins again from there", async () => {
  const all = await opened({ step: 595 });
  all.stream.speed = 16;
  all.stream.play();
  await play(all, 5);
  assert.equal(all.view.step, LAST);
  assert.deepEqual(all.plays, [true, false]);
  all.stream.play();
  await play(all, 1);
  assert.ok(all.view.step < 50);
});

test("a running session goes on when more of it is there", async () => {
  let last = 100;
  const respond = (first) => new Response(chunk(first, last), { headers: { "cache-control": "no-store" } });
  const all = await opened({ step: 98, respond, range: { lastStep: 100, isRunning: true } });
  all.stream.pace = "steady";
  all.stream.speed = 16;
  all.stream.play();
  await play(all, 5);
  assert.equal(all.view.step, 100);
  assert.deepEqual(all.plays, [true], "it waits for more");
  last = 120;
  all.stream.setRange({ firstStep: 1, lastStep: 110, isRunning: true, gaps: [] });
  await play(all, 40);
  assert.equal(all.view.step, 110);
  all.stream.setRange({ firstStep: 1, lastStep: 120, isRunning: false, gaps: [] });
  await play(all, 40);
  assert.equal(all.view.step, 120);
  assert.deepEqual(all.plays, [true, false]);
});

test("a step that is said to be there but is not is asked for once", async () => {
  const respond = (first) => new Response(chunk(first, 100), { headers: { "cache-control": "no-store" } });
  const all = await opened({ step: 100, respond, range: { lastStep: 110, isRunning: true } });
  const before = all.asked.length;
  all.stream.play();
  await play(all, 20);
  assert.deepEqual([all.view.step, all.asked.length - before, all.stream.playing], [100, 1, true]);
  all.stream.setRange({ firstStep: 1, lastStep: 110, isRunning: false, gaps: [] });
  await play(all, 20);
  assert.deepEqual([all.view.step, all.asked.length - before, all.stream.playing], [100, 2, false]);
});

test("a chunk that cannot be had is tried again, and the picture stays", async () => {
  let isDown = true;
  const respond = (first) => (isDown && first === 257 ? Response.json({ detail: "The disk is gone." }, { status: 503 }) : null);
  const all = await opened({ step: 5, respond });
  all.stream.seek(400);
  await settled(all.stream);
  assert.equal(all.view.step, 5);
  const status = all.statuses.at(-1);
  assert.deepEqual([status.connected, status.reason, status.attempt, status.refused], [false, "The disk is gone.", 1, false]);
  isDown = false;
  all.page.timers.at(-1).callback();
  await settled(all.stream);
  assert.equal(all.view.step, 400);
  assert.equal(all.statuses.at(-1).connected, true);
});

test("what is not recorded is not asked for again, and elsewhere all is well", async () => {
  const respond = (first) => (first === 257 ? Response.json({ detail: "Steps 257 to 512 are gone." }, { status: 404 }) : null);
  const all = await opened({ step: 5, respond });
  all.stream.seek(400);
  await settled(all.stream);
  assert.deepEqual([all.statuses.at(-1).refused, all.page.timers.length], [true, 0]);
  all.stream.seek(6);
  await settled(all.stream);
  assert.deepEqual([all.view.step, all.statuses.at(-1).connected], [6, true]);
});

test("a chunk that lies in a gap is never asked for, and a jump over the gap goes on behind it", async () => {
  const respond = (first) => (first === 257 ? Response.json({ detail: "lost" }, { status: 404 }) : null);
  const all = await opened({ step: 5, respond, range: { gaps: [{ first_step: 200, num_steps: 400 }] } });
  all.stream.seek(199);
  await settled(all.stream);
  for (const [step, direction, reached] of [[200, 1, 599], [599, -1, 599], [598, -1, 199], [200, 1, 599]]) {
    all.stream.seek(step, { direction });
    await settled(all.stream);
    assert.deepEqual([all.view.step, all.statuses.at(-1).connected], [reached, true]);
  }
  assert.ok(!all.asked.includes(257));
});

test("damaged frames are said and nothing of them is shown", async () => {
  const respond = (first) => (first === 257 ? new Response(words(1, 2, 3, 4, 5, 6, 7, 8)) : null);
  const all = await opened({ step: 5, respond });
  all.stream.seek(300);
  await settled(all.stream);
  assert.equal(all.view.step, 5);
  assert.equal(all.statuses.at(-1).refused, true);
});

test("a server that does not answer is an outage", async () => {
  const respond = (first) => { if (first === 257) throw new TypeError("fetch failed"); };
  const all = await opened({ step: 5, respond });
  all.stream.seek(300);
  await settled(all.stream);
  assert.equal(all.statuses.at(-1).reason, "the server does not answer");
});

test("the chunks used longest ago are let go, by number and by size", async () => {
  const asked = [];
  const fetch = async (url) => (asked.push(Number(url.split("/").pop())), new Response(chunk(1, 3), { headers: { "cache-control": "immutable" } }));
  const few = new ChunkStore("s1", { fetch, maxChunks: 2 });
  for (const first of [1, 257, 1, 513, 1, 257]) await few.get(first);
  assert.deepEqual(asked, [1, 257, 513, 257]);
  const small = new ChunkStore("s1", { fetch, maxBytes: 1 });
  await small.get(1);
  await small.get(1);
  assert.equal(asked.length, 5, "the newest one stays however large it is");
});

test("markers are found in both directions and put into words", () => {
  const markers = [
    { step: 5, kind: "finish", request_id: "chatcmpl-0123456789", note: "stop" },
    { step: 9, kind: "preempt", request_id: "chatcmpl-abcdef0123", note: "" },
    { step: 9, kind: "bookmark", request_id: null, note: "look" },
    { step: 12, kind: "gap", request_id: null, note: "" },
  ];
  assert.equal(findMarker(markers, 5, 1).step, 9);
  assert.equal(findMarker(markers, 9, -1).step, 5);
  assert.equal(findMarker(markers, 1, 1, "preempt").step, 9);
  assert.equal(findMarker(markers, 12, 1), undefined);
  assert.equal(describeMarkers(markers, 9), "abcdef01 preempted, bookmark: look");
  assert.equal(describeMarkers(markers, 6), "");
  assert.deepEqual(wordMarkers(markers, 9)[0], { requestId: "chatcmpl-abcdef0123", words: "preempted" });
  const change = { step: 9, kind: "policies", request_id: null, note: "priority, newest-first, auto" };
  assert.equal(describeMarkers([change], 9), "policies changed: priority, newest-first, auto");
  assert.equal(describeMarkers([{ step: 9, kind: "preempt", request_id: "r-1", note: "swap" }], 9), "1 preempted, swapped out");
  assert.equal(shortId("plain"), "plain");
});

test("the marker under the pointer is the nearest, and of several at one step the tallest", () => {
  const markers = [{ step: 5, kind: "finish" }, { step: 9, kind: "finish" }, { step: 9, kind: "bookmark" }, { step: 12, kind: "gap" }];
  const at = (step) => step * 4;
  assert.equal(markerAt(markers, 37, at, 6).kind, "bookmark");
  assert.equal(markerAt(markers, 46, at, 6).step, 12);
  assert.equal(markerAt(markers, 28, at, 6), null);
});

test("what was before a recording that lost its beginning comes with its first chunk", async () => {
  const all = await opened({ step: 300, range: { firstStep: 257 } });
  all.stream.seek(0);
  await settled(all.stream);
  assert.deepEqual([all.view.step, all.asked.includes(1)], [256, false]);
});
