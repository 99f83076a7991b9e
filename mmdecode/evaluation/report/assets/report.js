document.addEventListener("play", event => {
  for (const other of document.querySelectorAll("audio")) if (other !== event.target) other.pause();
}, true);
for (const [box, name] of [["wrong", "only"], ["bare", "bare"]]) {
  const input = document.getElementById(box);
  const update = () => document.body.classList.toggle(name, input.checked);
  input.addEventListener("change", update);
  update();
}
document.addEventListener("click", event => {
  const word = event.target.closest(".word[data-start]");
  if (!word) return;
  const audio = word.closest(".clip").querySelector("audio");
  audio.currentTime = Number(word.dataset.start);
  audio.play();
});
document.addEventListener("timeupdate", event => {
  const now = event.target.currentTime;
  for (const word of event.target.closest(".clip").querySelectorAll(".word[data-start]"))
    word.classList.toggle("now", word.dataset.start <= now && now < word.dataset.end);
}, true);
