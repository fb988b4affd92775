// The words and the stream of a growing answer.

import assert from "node:assert/strict";
import { test } from "node:test";

import { AnswerStream, describePhase } from "../../static/js/chat_stream.js";

const STATS = {
  phase: "decode", seq_id: 4, slot: 1, step: 9, num_output_tokens: 12, num_computed_tokens: 40, num_known_tokens: 41,
  tok_s: 211.6, waits_for: null, num_preemptions: 0,
};

test("each phase is put into words", () => {
  assert.equal(describePhase({ ...STATS, phase: "starting" }), "starting");
  assert.equal(describePhase({ ...STATS, phase: "queued" }), "queued");
  assert.equal(describePhase({ ...STATS, phase: "queued", waits_for: "every slot is taken" }), "queued: every slot is taken");
  assert.equal(describePhase({ ...STATS, phase: "prefill", num_computed_tokens: 1024, num_known_tokens: 2048 }), "prefill 50%, 1,024 of 2,048 tokens");
  assert.equal(describePhase({ ...STATS, phase: "prefill", num_known_tokens: 0, num_computed_tokens: 0 }), "prefill 0%, 0 of 0 tokens");
  assert.equal(describePhase(STATS), "decoding, 12 tokens, 212 tok/s");
  assert.equal(describePhase({ ...STATS, num_output_tokens: 1, tok_s: null }), "decoding, 1 token");
});

test("a preemption is said in every phase", () => {
  assert.equal(describePhase({ ...STATS, num_preemptions: 1 }), "decoding, 12 tokens, 212 tok/s, preempted 1 time");
  assert.match(describePhase({ ...STATS, phase: "prefill", num_preemptions: 2 }), /^computing again 97%, .* preempted 2 times$/);
  assert.equal(describePhase({ ...STATS, phase: "queued", num_preemptions: 2 }), "queued, preempted 2 times");
});

class FakeSource {
  listeners = {};
  readyState = 1;
  constructor(url) {
    this.url = url;
    FakeSource.newest = this;
  }
  addEventListener(name, listener) {
    this.listeners[name] = listener;
  }
  emit(name, data, id) {
    this.listeners[name]({ data: JSON.stringify(data), lastEventId: String(id) });
  }
  close() {
    this.readyState = 2;
  }
}

function makeElement() {
  const text = { parts: [], append(part) { this.parts.push(part); } };
  const words = { textContent: "" };
  const phase = { dataset: {}, querySelector: () => words };
  return { dataset: { stream: "/s", from: "3" }, text, words, phase, querySelector: (name) => (name === ".phase" ? phase : text) };
}

test("text, progress, loss and end reach the page", () => {
  globalThis.EventSource = FakeSource;
  const seen = [];
  const element = makeElement();
  const stream = new AnswerStream(element, {
    ontext: () => seen.push("text"), onstats: ({ slot }) => seen.push(slot), onend: (ended) => seen.push(ended === element),
  });
  stream.resume();
  const source = FakeSource.newest;
  assert.equal(source.url, "/s?from=3");
  source.emit("stats", STATS);
  source.emit("text", { text: "<b>" }, 6);
  assert.deepEqual(element.text.parts, ["<b>"]);
  assert.equal(element.phase.dataset.phase, "decode");
  source.emit("error");
  assert.match(element.words.textContent, /trying again/);
  assert.equal(element.phase.dataset.lost, "");
  source.emit("open");
  assert.equal(element.phase.dataset.lost, undefined);
  source.emit("end", {});
  assert.equal(source.readyState, 2);
  assert.deepEqual(seen, [1, "text", true]);
  FakeSource.newest = null;
  stream.resume();
  assert.equal(FakeSource.newest, null); // it has ended
});

test("a stream that the server refuses says so", () => {
  const element = makeElement();
  new AnswerStream(element, { ontext: () => {}, onstats: () => {}, onend: () => {} }).resume();
  FakeSource.newest.readyState = 2;
  FakeSource.newest.emit("error");
  assert.match(element.words.textContent, /reload the page/);
});

test("a paused stream holds no connection and goes on behind the last character", () => {
  const element = makeElement();
  const stream = new AnswerStream(element, { ontext: () => {}, onstats: () => {}, onend: () => {} });
  stream.resume();
  const first = FakeSource.newest;
  stream.resume();
  assert.equal(FakeSource.newest, first); // one connection, however often it is asked for
  first.emit("text", { text: "\u{1f600}\u{1f600}" }, 5); // two characters of two units each
  stream.pause();
  stream.pause();
  assert.equal(first.readyState, 2);
  stream.resume();
  assert.notEqual(FakeSource.newest, first);
  assert.equal(FakeSource.newest.url, "/s?from=5");
});
