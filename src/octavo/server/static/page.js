"use strict";
// The live counters and the chat box. Text from the model is only ever set as text, never as HTML.
const body = document.body, root = body.dataset.root, byId = (id) => document.getElementById(id);
const isChat = body.dataset.mode === "chat";
const talk = byId("talk"), form = byId("ask"), text = byId("text"), key = byId("key");
let turns = [], running = null, before = null;

key.hidden = body.dataset.needsKey !== "yes";

function headers() {
  const all = { "Content-Type": "application/json" };
  if (key.value) all.Authorization = "Bearer " + key.value;
  return all;
}

const number = (value) => value.toLocaleString("en");
const sum = (values) => typeof values === "number" ? values : Object.values(values).reduce((all, one) => all + one, 0);

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"], power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return (value / 1024 ** power).toFixed(power ? 1 : 0) + " " + units[power];
}

// What lies below the device, and what is pinned or was found again: lines that only some servers have.
function tiers(stats) {
  const lines = [];
  for (const [name, room] of Object.entries(stats["tier_capacity_bytes"] || {}))
    lines.push([name, stats["tier_bytes_used"][name] / room, bytes(stats["tier_bytes_used"][name]) + " in use, "
      + bytes(stats["tier_bytes_cached"][name]) + " kept of " + bytes(room)]);
  const broken = sum(stats.broken_pins_total);
  if (stats.pinned_tokens || broken)
    lines.push(["pins", null, number(stats.pinned_tokens) + " positions" + (broken ? ", " + number(broken) + " lost" : "")]);
  const hits = stats.prefix_cache_hits_total, asked = stats.prefix_cache_queries_total;
  if (asked)
    lines.push(["reused", sum(hits) / asked, (typeof hits === "number" ? [number(hits)] : Object.entries(hits).map(
      ([name, tokens]) => number(tokens) + " from the " + name)).join(", ") + " of " + number(asked) + " positions looked up"]);
  byId("tiers").replaceChildren(...lines.map(([name, share, said]) => {
    const line = document.createElement("p"), meter = document.createElement("meter");
    line.className = "pool";
    line.dataset.tier = name;
    if (share !== null) meter.value = share;
    line.append(name + " ", ...(share === null ? [] : [meter, " "]), said);
    return line;
  }));
}

async function refresh() {
  let state = "gone";
  try {
    const answer = await fetch(root + "/stats", { headers: headers(), cache: "no-store" });
    if (answer.ok) {
      const now = await answer.json(), at = performance.now();
      state = now.state;
      const output = now.time_to_first_token_seconds.count + now.inter_token_latency_seconds.count;
      const waiting = sum(now.waiting_sequences);
      byId("running").textContent = number(now.active_sequences);
      byId("waiting").textContent = number(waiting);
      if (before) byId("rate").textContent = ((output - before.output) * 1000 / (at - before.at)).toFixed(1);
      byId("output").textContent = number(output);
      byId("requests").textContent = number(sum(now.finished_total) + now.active_sequences + waiting);
      byId("preemptions").textContent = number(sum(now.preemptions_total));
      byId("blocks").textContent = bytes(sum(now.kv_bytes_used)) + " of " + bytes(now.kv_capacity_bytes)
        + " (" + (100 * now.kv_usage).toFixed(1) + "%), " + number(now.live_cached_tokens) + " positions";
      byId("pool").value = now.kv_usage;
      tiers(now);
      before = { output, at };
    } else {
      state = answer.status === 401 ? "needs a key" : "HTTP " + answer.status;
    }
  } catch { /* the server is gone: said below */ }
  byId("state").textContent = state;
  byId("state").className = "state " + state.split(" ")[0];
  setTimeout(refresh, document.hidden ? 5000 : 1000);
}

function turn(who, content) {
  const element = document.createElement("div");
  element.className = "turn " + who;
  element.dataset.who = who;
  element.textContent = content;
  talk.append(element);
  talk.scrollTop = talk.scrollHeight;
  return element;
}

function cost(usage, seconds) {
  const record = usage.octavo[0], element = document.createElement("div");
  element.className = "cost";
  const first = record ? ", first after " + (record.queue_time + record.prefill_time).toFixed(2) + " s" : "";
  const blocks = record ? ", " + number(sum(record.allocated_blocks)) + " blocks of KV cache" : "";
  const rate = usage.completion_tokens / seconds;
  element.textContent = usage.prompt_tokens + " tokens in, " + usage.completion_tokens + " out" + first
    + ", " + rate.toFixed(1) + " tokens/s" + blocks;
  talk.append(element);
  talk.scrollTop = talk.scrollHeight;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(asked) {
  turn("user", asked);
  const said = turns; // "New chat" starts another list: what comes after it belongs to this one
  const reply = turn("assistant", ""), begun = performance.now();
  const wanted = { stream: true, stream_options: { include_usage: true }, max_tokens: Number(byId("limit").value) || 256 };
  if (byId("temperature").value !== "") wanted.temperature = Number(byId("temperature").value);
  if (isChat) wanted.messages = [...said, { role: "user", content: asked }];
  else wanted.prompt = asked;
  running = new AbortController();
  byId("stop").hidden = false;
  byId("send").disabled = true;
  let answer = "";
  reply.classList.add("pending");
  try {
    const response = await fetch(root + (isChat ? "/v1/chat/completions" : "/v1/completions"),
      { method: "POST", headers: headers(), body: JSON.stringify(wanted), signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice) answer += (isChat ? choice.delta.content : choice.text) || "";
      reply.textContent = answer;
      talk.scrollTop = talk.scrollHeight;
      if (event.usage) cost(event.usage, (performance.now() - begun) / 1000);
    }
  } catch (error) {
    if (error.name !== "AbortError") turn("error", error.message);
  }
  reply.classList.remove("pending");
  if (!answer) reply.remove();
  if (answer) said.push({ role: "user", content: asked }, { role: "assistant", content: answer });
  running = null;
  byId("stop").hidden = true;
  byId("send").disabled = false;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const asked = text.value.trim();
  if (!asked || running) return;
  text.value = "";
  ask(asked);
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => { running?.abort(); turns = []; talk.replaceChildren(); text.focus(); });
refresh();
