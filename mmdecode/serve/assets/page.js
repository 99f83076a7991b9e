const at = (id) => document.getElementById(id);
const MOST_RATE = 48000; // of samples that the server takes, in Hz
let cancelling = null; // ends the transcription of a file
let live = null; // the microphone: its audio context, its tracks, its socket

function say(text, isError = false) {
  at("status").textContent = text;
  at("status").classList.toggle("error", isError);
}

// the page is idle, opens the microphone, listens, waits for the last words, or reads a file
function turn(state) {
  document.body.dataset.state = state;
  at("record").disabled = !navigator.mediaDevices;
  at("record").ariaDisabled = !(state in CLICKS); // and keeps the focus of the keyboard
  at("record").textContent = state === "listens" ? "Stop microphone" : "Start microphone";
  at("file").disabled = state !== "idle";
  at("cancel").hidden = state !== "reads";
}

function put(committed, provisional = "") {
  at("committed").textContent = committed.trimStart();
  at("provisional").textContent = committed ? provisional : provisional.trimStart();
  at("copy").disabled = at("clear").disabled = !committed;
}

const add = (committed, provisional) => put(at("committed").textContent + committed, provisional);

function clear() {
  put("");
  at("delay").textContent = "";
  if (document.body.dataset.state === "idle") say("");
}

async function ask(path, options = {}) {
  const key = at("key").value;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { ...options, headers }).catch(lost);
  if (answer.ok) return answer;
  if (answer.status === 401) {
    at("settings").open = true;
    at("key").focus();
    throw new Error(key ? "The server refuses this key." : "This server needs a key: enter it under Settings.");
  }
  const body = await answer.json().catch(() => null); // none of a server that has closed the connection
  const short = answer.status === 413 ? "The file is too large for this server." : `The server answers ${answer.status}.`;
  throw new Error(body?.error?.message ?? short);
}

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("The connection to the server failed; try again.");
}

async function models() {
  return (await (await ask("/v1/models")).json()).data.map((one) => one.id);
}

async function greet() {
  at("model").textContent = "";
  at("model").textContent = (await models()).join(", ");
}

// ---- the microphone

async function start() {
  if (!at("step").reportValidity()) return;
  clear();
  turn("opens");
  const mine = (live = { context: new AudioContext(), isClosing: false, isTold: false });
  try {
    if (mine.context.sampleRate > MOST_RATE) {
      await mine.context.close();
      mine.context = new AudioContext({ sampleRate: MOST_RATE });
    }
    await models(); // a page reads why a request is refused, but not why a websocket is
    say("The browser asks whether this page may use the microphone.");
    mine.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    await mine.context.audioWorklet.addModule("/assets/recorder.js");
    await mine.context.resume();
    connect(mine);
  } catch (error) {
    mute(mine);
    turn("idle");
    throw error;
  }
}

function connect(mine) {
  const { context, stream } = mine;
  const socket = new WebSocket(location.origin.replace(/^http/, "ws") + "/v1/audio/stream");
  mine.socket = socket;
  socket.onopen = () => {
    const first = { type: "start", rate: context.sampleRate, step_s: at("step").valueAsNumber };
    if (at("key").value) first.key = at("key").value;
    if (at("language").value) first.language = at("language").value;
    socket.send(JSON.stringify(first));
    const recorder = new AudioWorkletNode(context, "recorder");
    recorder.port.onmessage = (event) => {
      if (socket.readyState === WebSocket.OPEN && document.body.dataset.state === "listens") socket.send(event.data);
    };
    context.createMediaStreamSource(stream).connect(recorder);
    stream.getTracks().forEach((track) => (track.onended = finish)); // unplugged
    turn("listens");
    say("Listening; words in grey may still change.");
  };
  socket.onmessage = (event) => take(mine, JSON.parse(event.data));
  socket.onclose = (event) => {
    mute(mine);
    turn("idle");
    if (!mine.isTold) say(`The connection to the server was lost${event.reason && `: ${event.reason}`}.`, true);
  };
}

function take(mine, update) {
  if (update.type === "update") {
    add(update.committed, update.provisional);
    at("delay").textContent = `${update.audio_s.toFixed(1)} s heard, ${update.delay_s.toFixed(2)} s late`;
  } else if (update.type === "closing") {
    mine.isClosing = true;
    mute(mine);
    turn("ends");
    say("The server ends; the last words follow.");
  } else if (update.type === "done") {
    mine.isTold = true;
    say(mine.isClosing ? "The server has ended; these were the last words." : "Done.", mine.isClosing);
  } else if (update.type === "error") {
    mine.isTold = true;
    say(update.message, true);
  }
}

function finish() {
  mute(live);
  if (live.socket.readyState !== WebSocket.OPEN) return;
  turn("ends");
  say("The last words follow.");
  live.socket.send(JSON.stringify({ type: "finish" }));
}

function mute({ context, stream }) {
  stream?.getTracks().forEach((track) => track.stop());
  if (context.state !== "closed") context.close();
}

// ---- files

async function transcribe(file) {
  clear();
  turn("reads");
  say(`Transcribing ${file.name}…`);
  cancelling = new AbortController();
  try {
    const form = new FormData();
    form.append("file", file);
    form.append("model", (await models())[0]);
    form.append("stream", "true");
    if (at("language").value) form.append("language", at("language").value);
    const options = { method: "POST", body: form, signal: cancelling.signal };
    const seconds = await read(await ask("/v1/audio/transcriptions", options));
    say(`Done: ${seconds.toFixed(1)} s of audio.`);
  } finally {
    turn("idle");
    if ([document.body, at("cancel")].includes(document.activeElement)) at("file").focus();
  }
}

async function read(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) throw new Error("The connection to the server was lost; this is not all of the text.");
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      if (event.type === "transcript.text.delta") add(event.delta);
      if (event.type === "transcript.text.done") {
        put(event.text);
        return event.usage.seconds;
      }
    }
  }
}

// ---- what the user does

const MEANINGS = {
  AbortError: "Cancelled.",
  NotAllowedError: "The browser does not let this page use the microphone; allow it in its settings for this page.",
  NotFoundError: "There is no microphone.",
  NotReadableError: "The microphone cannot be opened; another program may use it.",
};

const guarded = (run) => async (event) => {
  try {
    await run(event);
  } catch (error) {
    say(MEANINGS[error.name] ?? error.message, error.name !== "AbortError");
  }
};

const CLICKS = { idle: start, listens: finish }; // on the microphone's button, by state
at("record").onclick = guarded(() => CLICKS[document.body.dataset.state]?.());
at("file").onchange = guarded(async (event) => {
  const [file] = event.target.files;
  if (file) await transcribe(file).finally(() => (event.target.value = "")); // so that it can be chosen again
});
at("cancel").onclick = () => cancelling.abort();
at("copy").onclick = guarded(async () => {
  getSelection().selectAllChildren(at("committed"));
  if (navigator.clipboard) await navigator.clipboard.writeText(at("committed").textContent);
  else document.execCommand("copy"); // pages that did not come over https have no clipboard
  at("copy").textContent = "Copied";
  setTimeout(() => (at("copy").textContent = "Copy text"), 1500);
});
at("clear").onclick = clear;
at("key").onchange = guarded(async () => {
  if (at("status").classList.contains("error")) say("");
  await greet();
});
at("insecure").hidden = Boolean(navigator.mediaDevices);
turn("idle");
guarded(greet)();
