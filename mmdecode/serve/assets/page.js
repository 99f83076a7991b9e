const at = (id) => document.getElementById(id);
let live = null; // the microphone: its socket, its audio context, its tracks

function say(text, isError = false) {
  at("status").textContent = text;
  at("status").classList.toggle("error", isError);
}

function show(committed, provisional = "") {
  const line = at("committed");
  line.textContent += line.textContent ? committed : committed.trimStart();
  at("provisional").textContent = line.textContent ? provisional : provisional.trimStart();
}

function clear() {
  at("committed").textContent = at("provisional").textContent = at("delay").textContent = "";
}

function headers() {
  const key = at("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function models() {
  const answer = await fetch("/v1/models", { headers: headers() });
  if (!answer.ok) throw new Error(answer.status === 401 ? "this server wants a key: see Settings" : answer.statusText);
  return (await answer.json()).data.map((one) => one.id);
}

async function start() {
  clear();
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  const context = new AudioContext();
  await context.audioWorklet.addModule("/assets/recorder.js");
  const address = location.origin.replace(/^http/, "ws") + "/v1/audio/stream";
  const socket = new WebSocket(address);
  live = { socket, context, stream };
  socket.onopen = () => {
    const first = { type: "start", rate: context.sampleRate, step_s: Number(at("step").value) };
    if (at("key").value) first.key = at("key").value;
    if (at("language").value) first.language = at("language").value;
    socket.send(JSON.stringify(first));
    const recorder = new AudioWorkletNode(context, "recorder");
    recorder.port.onmessage = (event) => {
      if (socket.readyState === WebSocket.OPEN && live?.socket === socket) socket.send(event.data);
    };
    context.createMediaStreamSource(stream).connect(recorder);
    say("Listening; words in grey may still change.");
  };
  socket.onmessage = (event) => take(JSON.parse(event.data));
  socket.onclose = (event) => {
    if (event.code !== 1000 && !at("status").classList.contains("error")) {
      say(`The connection ended: ${event.reason || `code ${event.code}`}.`, true);
    }
    stop();
    at("record").disabled = false;
  };
  at("record").setAttribute("aria-pressed", "true");
  at("record").textContent = "Stop microphone";
}

function take(update) {
  if (update.type === "update") {
    show(update.committed, update.provisional);
    at("delay").textContent = `${update.audio_s.toFixed(1)} s heard, ${update.delay_s.toFixed(2)} s late`;
  } else if (update.type === "closing") {
    say("The server ends; the last words follow.");
  } else if (update.type === "done") {
    say("Done.");
  } else if (update.type === "error") {
    say(update.message, true);
  }
}

function stop() {
  if (!live) return;
  const { socket, context, stream } = live;
  live = null;
  stream.getTracks().forEach((track) => track.stop());
  context.close();
  at("record").setAttribute("aria-pressed", "false");
  at("record").textContent = "Start microphone";
  if (socket.readyState === WebSocket.OPEN) {
    at("record").disabled = true; // until the last words are there
    say("The last words follow.");
    socket.send(JSON.stringify({ type: "finish" }));
  }
}

async function transcribe(file) {
  clear();
  say(`Transcribing ${file.name}…`);
  const form = new FormData();
  form.append("file", file);
  form.append("model", (await models())[0]);
  form.append("stream", "true");
  if (at("language").value) form.append("language", at("language").value);
  const answer = await fetch("/v1/audio/transcriptions", { method: "POST", body: form, headers: headers() });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      if (event.type === "transcript.text.delta") show(event.delta);
      if (event.type === "transcript.text.done") say(`Done: ${event.usage.seconds.toFixed(1)} s of audio.`);
    }
  }
}

const guarded = (run) => async (event) => {
  try {
    await run(event);
  } catch (error) {
    say(error.message, true);
  }
};

at("record").onclick = guarded(() => (live ? stop() : start()));
at("file").onchange = guarded(async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) await transcribe(file);
});
at("copy").onclick = guarded(() => navigator.clipboard.writeText(at("committed").textContent));
at("clear").onclick = clear;
at("key").onchange = guarded(async () => at("model").textContent = (await models()).join(", "));
guarded(async () => at("model").textContent = (await models()).join(", "))();
