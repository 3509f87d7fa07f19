// The page's script. Text of the model and of the user reaches the document as text nodes, never as markup.

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const SPEED_WINDOW_S = 3;
const MINUTE_S = 60;
const POINTS = 60;

let key = sessionStorage.getItem("tenfold-key") || "";
let conversation = [];
let running = null; // the AbortController of the answer under way
let model = ""; // whose figures are shown, and who is asked
let chosen = ""; // of several; empty: the server's first

/** fetch with the key, if there is one. */
function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store" });
}

/** An element with a class and text. */
function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.append(text);
  return element;
}

/* Key */

let asking = null;

/** Asks for a key; resolves to whether one was given. Asked twice at once, it asks once. */
function askKey() {
  asking ??= new Promise((resolve) => {
    const dialog = $("key");
    $("key-text").textContent = key
      ? "The key was not accepted. It is kept in this tab only, and sent to this server only."
      : "It is kept in this tab only, and sent to this server only.";
    $("key-value").value = "";
    dialog.returnValue = "";
    dialog.onclose = () => {
      const given = dialog.returnValue === "given" && $("key-value").value.trim();
      if (given) sessionStorage.setItem("tenfold-key", (key = given));
      $("key-value").value = "";
      asking = null;
      resolve(Boolean(given));
      if (given) poll();
    };
    dialog.showModal();
  });
  return asking;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  $("key").close("given");
});
$("key-cancel").addEventListener("click", () => $("key").close(""));

/* Figures */

const samples = []; // of /stats, oldest first, a little more than a minute
const speeds = [];
let polling = 0; // the timer
let refused = false; // no key, and none given: the figures are not asked for again and again

function state(kind, text) {
  const element = $("state");
  element.className = `state ${kind}`;
  if (element.textContent !== text) element.textContent = text;
}

async function poll() {
  clearTimeout(polling);
  try {
    const asked = chosen;
    const response = await request(asked ? `stats?model=${encodeURIComponent(asked)}` : "stats");
    if (asked !== chosen) return poll();
    if (response.status === 401) {
      state("bad", "needs a key");
      $("figures").classList.add("stale");
      if (!refused) {
        refused = true; // until a key is given
        if (await askKey()) refused = false;
      }
      return;
    }
    if (response.status === 404) {
      // It was unloaded: the server's first is shown instead, if there is one.
      $("figures").classList.add("stale");
      state("bad", (await response.json()).error.message);
      if (chosen) {
        chosen = "";
        return poll();
      }
    } else if (!response.ok) throw new Error(`status ${response.status}`);
    else show(await response.json());
  } catch {
    state("bad", "not reachable");
    $("figures").classList.add("stale");
  }
  clearTimeout(polling);
  if (!document.hidden) polling = setTimeout(poll, POLL_MS);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});

function figure(name, text, since) {
  document.querySelector(`[data-figure="${name}"]`).textContent = text;
  const element = document.querySelector(`[data-since="${name}"]`);
  if (element) element.textContent = since ?? "";
}

/** The newest sample that is at least so old, or the oldest one. */
function before(now, seconds) {
  for (let i = samples.length - 1; i >= 0; i--) {
    if (now.uptime_s - samples[i].uptime_s >= seconds) return samples[i];
  }
  return samples[0];
}

/** part / whole of the last minute, or else since the start; null if there was nothing. */
function ratio(now, part, whole) {
  const old = before(now, MINUTE_S);
  if (old && now[whole] > old[whole]) {
    return [(now[part] - old[part]) / (now[whole] - old[whole]), "last minute"];
  }
  return now[whole] ? [now[part] / now[whole], "since start"] : null;
}

function show(now) {
  if (model !== now.model) {
    model = now.model;
    $("model").textContent = model;
    if ($("empty-model")) $("empty-model").textContent = model;
    document.title = `${model} – Tenfold`;
    samples.length = speeds.length = 0;
  }
  showModels(now.models);
  if (now.ready) state("good", "ready");
  else state("bad", `not ready: ${now.not_ready_reason}`);
  $("figures").classList.remove("stale");
  if (samples.length && samples[samples.length - 1].uptime_s > now.uptime_s) samples.length = 0; // a new server

  const old = before(now, SPEED_WINDOW_S);
  const past = old ? now.uptime_s - old.uptime_s : 0;
  const speed = past > 0 ? (now.generated_tokens - old.generated_tokens) / past : 0;
  figure("speed", samples.length ? number(speed) : "–");
  const ttft = ratio(now, "first_token_wait_s", "first_tokens");
  figure("ttft", ttft ? time(ttft[0]) : "–", ttft?.[1]);
  const cache = ratio(now, "cached_prompt_tokens", "prompt_tokens");
  figure("cache", cache ? `${Math.round(cache[0] * 100)} %` : "–", cache?.[1]);
  const acceptance = ratio(now, "decode_step_tokens", "decode_steps");
  figure("acceptance", acceptance ? acceptance[0].toFixed(2) : "–", acceptance?.[1]);
  figure("running", String(now.requests_running));
  figure("queue", String(now.requests_waiting));
  const used = now.workers.reduce((sum, worker) => sum + worker.kv_used_bytes, 0);
  const total = now.workers.reduce((sum, worker) => sum + worker.kv_total_bytes, 0);
  figure("kv", total ? `${bytes(used)} of ${bytes(total)}` : "–");
  $("kv-bar").style.width = total ? `${(100 * used) / total}%` : "0";
  showWorkers(now.workers);

  speeds.push(speed);
  if (speeds.length > POINTS) speeds.shift();
  draw();
  samples.push(now);
  while (now.uptime_s - samples[0].uptime_s > MINUTE_S + 5) samples.shift();
}

function showModels(names) {
  const several = names.length > 1;
  $("model").hidden = several;
  $("models").hidden = !several;
  const options = [...$("models").options].map((option) => option.value);
  if (options.join("\n") !== names.join("\n")) {
    $("models").replaceChildren(...names.map((name) => new Option(name)));
  }
  $("models").value = model;
}

$("models").addEventListener("change", () => {
  chosen = $("models").value;
  poll();
});

function showWorkers(workers) {
  $("workers").hidden = workers.length < 2;
  const rows = workers.map((worker) => {
    const row = make("tr");
    for (const text of [
      worker.name,
      worker.running,
      worker.waiting,
      `${Math.round((100 * worker.kv_used_bytes) / worker.kv_total_bytes)} %`,
    ]) row.append(make("td", "", String(text)));
    return row;
  });
  $("workers").tBodies[0].replaceChildren(...rows);
}

function draw() {
  if (speeds.length < 2) return;
  const top = Math.max(...speeds, 1);
  const points = speeds.map((value, i) => {
    const x = 120 - ((speeds.length - 1 - i) * 120) / (POINTS - 1);
    return `${x.toFixed(1)},${(31 - (29 * value) / top).toFixed(1)}`;
  });
  const line = `M${points.join("L")}`;
  document.querySelector("#speed .line").setAttribute("d", line);
  const first = points[0].split(",")[0];
  document.querySelector("#speed .area").setAttribute("d", `${line}L120,32L${first},32Z`);
}

const number = (value) => (value >= 100 || value === 0 ? value.toFixed(0) : value.toFixed(1));
const time = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`);

function bytes(count) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= size) return `${(count / size).toFixed(count >= 10 * size ? 0 : 1)} ${unit}`;
  }
  return `${count} B`;
}

/* Sampling */

/** The body's fields, of whatever is filled in. */
function sampling() {
  const fields = {};
  for (const input of $("sampling").querySelectorAll("input")) {
    const text = input.name === "stop" ? input.value : input.value.trim();
    if (!text) continue;
    fields[input.name] = input.type === "number" ? Number(text) : text;
  }
  return fields;
}

function settingsChanged() {
  for (const input of $("sampling").querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  const fields = [...$("sampling").querySelectorAll("input, textarea")];
  const count = fields.filter((input) => input.value !== input.defaultValue).length;
  $("changed").textContent = count ? `(${count} changed)` : "";
}

$("sampling").addEventListener("input", settingsChanged);
$("sampling").addEventListener("reset", () => setTimeout(settingsChanged));
$("sampling").addEventListener("submit", (event) => event.preventDefault());

/** A body as JSON. A seed has 64 bits, more than a number here can hold: its digits are written as they are. */
function encode(body) {
  const { seed, ...rest } = body;
  const text = JSON.stringify(rest);
  return seed === undefined ? text : `${text.slice(0, -1)},"seed":${/^-?\d+$/.test(seed) ? BigInt(seed) : JSON.stringify(seed)}}`;
}

/* Conversation */

function turn(who, name) {
  $("empty")?.remove();
  const element = make("article", `turn ${who}`);
  element.append(make("h2", "", name));
  const text = make("div", "text");
  element.append(text);
  $("log").append(element);
  return { element, text };
}

/** Keeps the end in sight for who looks at it, and nobody else. */
function follow(change) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function fail(answer, message, field) {
  const error = make("p", "error", message);
  error.setAttribute("role", "alert");
  follow(() => answer.element.append(error));
  const input = field && $("sampling").querySelector(`[name="${CSS.escape(field)}"]`);
  if (input) {
    document.querySelector("#settings details").open = true;
    input.setAttribute("aria-invalid", "true");
  }
}

/** The data of each server-sent event, as it comes. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function answerTo(messages) {
  const answer = turn("assistant", model || "assistant");
  answer.element.setAttribute("aria-busy", "true");
  $("log").scrollTop = $("log").scrollHeight;
  const control = new AbortController();
  running = control;
  working(true);
  const node = document.createTextNode("");
  answer.text.append(node);
  const clock = { began: performance.now(), first: 0, last: 0 };
  let text = "";
  let waiting = "";
  let drawing = 0;
  let finish = null;
  let usage = null;
  let whole = false;
  const flush = () => {
    drawing = 0;
    const more = waiting;
    waiting = "";
    if (more) follow(() => node.appendData(more));
  };
  try {
    const body = { messages, stream: true, stream_options: { include_usage: true }, ...sampling() };
    if (model) body.model = model;
    let response;
    for (;;) {
      clock.began = performance.now();
      response = await request("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: encode(body),
        signal: control.signal,
      });
      if (response.status !== 401 || !(await askKey())) break;
    }
    if (!response.ok) {
      const error = (await response.json().catch(() => null))?.error;
      fail(answer, error?.message ?? `The server answered with status ${response.status}.`, error?.param);
      return { text, ok: false };
    }
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        whole = true;
        break;
      }
      const event = JSON.parse(data);
      if (event.error) {
        fail(answer, event.error.message);
        return { text, ok: false };
      }
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      finish = choice?.finish_reason ?? finish;
      const more = choice?.delta?.content;
      if (more) {
        clock.last = performance.now();
        clock.first ||= clock.last;
        text += more;
        waiting += more;
        drawing ||= requestAnimationFrame(flush);
      }
    }
    if (!whole) fail(answer, "The stream broke off: the answer is not whole.");
    return { text, ok: whole };
  } catch (error) {
    if (control.signal.aborted) finish = "stopped by you";
    else fail(answer, `The server cannot be reached (${error.message}).`);
    return { text, ok: control.signal.aborted && text !== "" };
  } finally {
    cancelAnimationFrame(drawing);
    flush();
    answer.element.removeAttribute("aria-busy");
    footer(answer, clock, usage, finish, text);
    running = null;
    working(false);
    $("announce").textContent = finish ? `Answer ended: ${finish}. ${text}` : "";
    poll();
  }
}

function footer(answer, clock, usage, finish, text) {
  const facts = [];
  if (clock.first) facts.push(`first token ${time((clock.first - clock.began) / 1000)}`);
  if (usage) {
    const seconds = (clock.last - clock.first) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0) {
      facts.push(`${number((usage.completion_tokens - 1) / seconds)} tokens/s`);
    }
    facts.push(usage.completion_tokens === 1 ? "1 token" : `${usage.completion_tokens} tokens`);
    facts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  const reason = { stop: "", length: "cut at the most tokens" }[finish] ?? finish;
  if (reason) facts.push(reason);
  if (!facts.length) return;
  const foot = make("div", "foot");
  for (const fact of facts) foot.append(make("span", "", fact));
  if (text && navigator.clipboard) {
    const copy = make("button", "", "Copy");
    copy.type = "button";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    });
    foot.append(copy);
  }
  follow(() => answer.element.append(foot));
}

function working(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  if (!yes) $("message").focus({ preventScroll: true });
}

async function submit() {
  const message = $("message").value;
  if (!message.trim() || running) return;
  if (!$("sampling").reportValidity()) {
    document.querySelector("#settings details").open = true;
    $("sampling").reportValidity();
    return;
  }
  $("message").value = "";
  grow();
  const said = turn("user", "You");
  said.text.append(message);
  const talk = conversation;
  const system = $("system").value.trim();
  const asked = [...talk, { role: "user", content: message }];
  const { text, ok } = await answerTo(system ? [{ role: "system", content: system }, ...asked] : asked);
  // What failed is not part of the conversation; the message comes back to be sent again.
  if (ok) talk.push(asked[asked.length - 1], { role: "assistant", content: text });
  else if (!$("message").value) {
    $("message").value = message;
    grow();
  }
}

function grow() {
  const box = $("message");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

const stop = () => running?.abort();

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("message").addEventListener("input", grow);
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key").open) stop();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => {
  stop();
  conversation = [];
  $("log").replaceChildren();
  $("message").focus();
});

$("base-url").textContent = new URL("v1", location.href).href;
if (matchMedia("(min-width: 52rem)").matches) {
  document.querySelector("#settings details").open = true;
  $("message").focus();
}
settingsChanged();
poll();
