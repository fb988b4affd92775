// static/js/stream.js against a fake browser.

import assert from "node:assert/strict";
import test from "node:test";
import { deflateRawSync } from "node:zlib";

import { EngineView } from "../../static/js/reducer.js";
import { EngineStream, retryDelayMs } from "../../static/js/stream.js";
import { FRAME } from "../../static/js/wire.js";
import { frame, hello, keyframe, message, rows, words } from "./frames.mjs";

class FakeSocket {
  static all = [];

  constructor(url) {
    this.url = new URL(url);
    this.readyState = 0;
    this.sent = [];
    this.closedWith = null;
    FakeSocket.all.push(this);
  }

  open() {
    this.readyState = 1;
  }

  send(buffer) {
    const view = new DataView(buffer);
    this.sent.push({
      type: view.getUint8(0), fps: view.getUint8(1), hidden: view.getUint16(2, true) === 1,
      step: view.getUint32(4, true), painted: view.getUint32(8, true),
    });
  }

  close(code) {
    this.closedWith = code;
    this.readyState = 3;
  }

  deliver(buffer) {
    this.onmessage({ data: buffer });
  }

  drop(code = 1006, reason = "") {
    this.readyState = 3;
    this.onclose({ code, reason });
  }
}

function setUp() {
  FakeSocket.all = [];
  const timers = [];
  const delays = [];
  const page = { visibilityState: "visible", listeners: [] };
  page.addEventListener = (_, listener) => page.listeners.push(listener);
  page.removeEventListener = (_, listener) => page.listeners.splice(page.listeners.indexOf(listener), 1);
  page.turn = (state) => {
    page.visibilityState = state;
    for (const listener of page.listeners) listener();
  };
  const env = {
    WebSocket: FakeSocket,
    location: { href: "https://example.test/live" },
    document: page,
    setTimeout: (callback, delay) => (delays.push(delay), timers.push({ callback }) - 1),
    clearTimeout: (index) => { timers[index] = null; },
  };
  const view = new EngineView({ clock: () => 0 });
  const changes = [];
  const statuses = [];
  const stream = new EngineStream(view, {
    env, onchange: (change) => changes.push(change), onstatus: (status) => statuses.push(status),
  });
  stream.start();
  return { view, stream, changes, statuses, timers, delays, page, socket: () => FakeSocket.all.at(-1) };
}

// All that needs no input from outside has happened then: it is done in microtasks.
const settle = () => new Promise((resolve) => setTimeout(resolve));

// Inflating takes its own time.
async function until(condition) {
  const deadline = Date.now() + 10_000;
  while (!condition()) {
    assert.ok(Date.now() < deadline, "waited too long");
    await settle();
  }
}

const first = (step = 1) => message(hello({ blocks: 2 }), keyframe(step, [7, 8]), rows(step, 1));

test("connects with the page's security, and again with the last step and session", async () => {
  const { stream, socket, timers, view } = setUp();
  assert.equal(socket().url.href, "wss://example.test/ws/engine");
  socket().open();
  socket().deliver(first(5));
  await settle();
  assert.equal(view.step, 5);
  socket().drop();
  timers.at(-1).callback();
  assert.equal(socket().url.search, "?from=5&session=s1");
  stream.stop();
});

test("acknowledges what was painted, once", async () => {
  const { stream, socket, changes } = setUp();
  socket().open();
  socket().deliver(first());
  socket().deliver(message(frame(FRAME.DELTA, words(1, 9), { firstStep: 2, nItems: 1 })));
  await settle();
  assert.deepEqual(socket().sent, []);
  stream.painted();
  stream.painted();
  assert.deepEqual(socket().sent, [{ type: 8, fps: 60, hidden: false, step: 2, painted: 2 }]);
  assert.equal(changes.length, 2);
  assert.equal(changes[0].changed, null);
  assert.deepEqual([...changes[1].changed], [1]);
});

test("a hidden page acknowledges by itself and asks for one message a second", async () => {
  const { stream, socket, page } = setUp();
  socket().open();
  socket().deliver(first());
  await settle();
  page.turn("hidden");
  assert.deepEqual(socket().sent.at(-1), { type: 8, fps: 1, hidden: true, step: 1, painted: 1 });
  socket().deliver(message(frame(FRAME.DELTA, words(), { firstStep: 2 })));
  await settle();
  assert.deepEqual(socket().sent.at(-1), { type: 8, fps: 1, hidden: true, step: 2, painted: 2 });
  page.turn("visible");
  assert.deepEqual(socket().sent.at(-1), { type: 8, fps: 60, hidden: false, step: 2, painted: 2 });
  stream.setFps(15);
  assert.equal(socket().sent.at(-1).fps, 15);
});

test("messages are applied in order though a keyframe takes time to inflate", async () => {
  const { socket, view, changes } = setUp();
  socket().open();
  const cells = deflateRawSync(Buffer.from(words(1, 2)));
  socket().deliver(message(hello({ blocks: 2 }), frame(FRAME.KEYFRAME, cells, { firstStep: 1, nItems: 2, flags: 1 })));
  socket().deliver(message(frame(FRAME.DELTA, words(0, 50), { firstStep: 2, nItems: 1 })));
  await until(() => changes.length === 2);
  assert.deepEqual([...view.cells], [50, 2]);
  assert.deepEqual(changes.map((change) => change.lastStep), [1, 2]);
});

test("what a dead connection still delivers does not disturb the next one", async () => {
  const { socket, view, timers } = setUp();
  socket().open();
  const cells = deflateRawSync(Buffer.from(words(1, 2)));
  const old = socket();
  old.deliver(message(hello({ blocks: 2 }), frame(FRAME.KEYFRAME, cells, { firstStep: 1, nItems: 2, flags: 1 })));
  old.deliver(message(frame(FRAME.DELTA, words(0, 50), { firstStep: 2, nItems: 1 })));
  old.drop();
  timers.at(-1).callback();
  socket().open();
  socket().deliver(message(hello({ blocks: 2 }), keyframe(9, [30, 31])));
  await until(() => view.step === 9);
  assert.deepEqual([...view.cells], [30, 31]);
});

test("reconnects with growing delays until a message comes", async () => {
  const { socket, statuses, timers, delays } = setUp();
  for (let attempt = 1; attempt <= 3; attempt++) {
    socket().drop();
    await settle();
    assert.equal(statuses.at(-1).attempt, attempt);
    assert.equal(statuses.at(-1).connected, false);
    timers.at(-1).callback();
  }
  assert.ok(delays[0] < delays[1] && delays[1] < delays[2]);
  socket().open();
  socket().deliver(first());
  await settle();
  assert.equal(statuses.at(-1).connected, true);
  assert.equal(statuses.at(-1).attempt, 0);
});

test("delays run from half a second to thirty", () => {
  assert.equal(retryDelayMs(1, () => 0), 500);
  assert.equal(retryDelayMs(2, () => 0), 1000);
  assert.equal(retryDelayMs(1, () => 1), 650);
  assert.equal(retryDelayMs(7, () => 1), 30_000);
  assert.equal(retryDelayMs(5000, () => 0), 30_000);
});

test("a refused page does not try again, and says why", async () => {
  const { socket, statuses, timers } = setUp();
  socket().drop(1008, "from is not a step number");
  await settle();
  assert.equal(timers.length, 0);
  assert.equal(statuses.at(-1).refused, true);
  assert.equal(statuses.at(-1).reason, "from is not a step number");
});

test("a page for which there is no room now tries again, later and later, and says why", async () => {
  const { socket, statuses, timers, delays } = setUp();
  for (let attempt = 1; attempt <= 4; attempt++) {
    socket().open();
    socket().drop(1013, "64 pages are watching already");
    await settle();
    assert.deepEqual([statuses.at(-1).refused, statuses.at(-1).attempt], [false, attempt]);
    assert.equal(statuses.at(-1).reason, "64 pages are watching already");
    timers.at(-1).callback();
  }
  assert.ok(delays.every((delay, i) => i === 0 || delay > delays[i - 1]));
});

test("a damaged message changes nothing and brings a new connection", async () => {
  const { socket, view, timers } = setUp();
  socket().open();
  socket().deliver(first());
  socket().deliver(message(keyframe(2, [1, 1]), frame(FRAME.DELTA, words(77, 1), { firstStep: 2, nItems: 1 })));
  await settle();
  assert.deepEqual([...view.cells], [7, 8]);
  assert.equal(view.step, 1);
  assert.equal(socket().closedWith, 4002);
  assert.equal(timers.length, 1);
});

test("a server of another protocol is not tried again", async () => {
  const { socket, statuses, timers } = setUp();
  socket().open();
  socket().deliver(message(hello({ blocks: 2, protocol: 2 })));
  await settle();
  assert.equal(timers.length, 0);
  assert.match(statuses.at(-1).reason, /reload/);
});

test("a listener that throws stops nothing", async (t) => {
  const thrown = [];
  const { queueMicrotask: real } = globalThis;
  t.mock.method(globalThis, "queueMicrotask", (callback) => real(() => {
    try {
      callback();
    } catch (error) {
      thrown.push(error); // a browser reports it and goes on
    }
  }));
  const { view, socket, changes } = setUp();
  changes.push = () => { throw new Error("in the view"); };
  socket().open();
  socket().deliver(first(1));
  socket().deliver(message(frame(FRAME.DELTA, words(0, 50), { firstStep: 2, nItems: 1 })));
  await settle();
  assert.equal(view.step, 2);
  assert.equal(thrown.length, 2);
});

test("somebody who looks again does not wait for the next try", async () => {
  const { socket, page, timers } = setUp();
  socket().drop();
  const before = FakeSocket.all.length;
  page.turn("hidden");
  page.turn("visible");
  assert.equal(FakeSocket.all.length, before + 1);
  assert.equal(timers[0], null);
});

test("stop ends it for good", async () => {
  const { stream, socket, page, timers, statuses } = setUp();
  socket().open();
  stream.stop();
  await settle();
  assert.equal(socket().closedWith, 1000);
  assert.equal(page.listeners.length, 0);
  assert.equal(timers.length, 0);
  assert.equal(statuses.at(-1).connected, false);
});
