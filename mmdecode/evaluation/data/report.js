const tip = document.getElementById("tip");
function show(event) {
  const group = event.target.closest(".pass");
  tip.hidden = !group;
  if (!group) return;
  tip.textContent = group.getAttribute("aria-label");
  const box = group.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const above = box.top - size.height - 6;
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - size.width - 8)) + "px";
  tip.style.top = (above > 0 ? above : box.bottom + 6) + "px";
}
document.addEventListener("mouseover", show);
document.addEventListener("click", show);
document.addEventListener("scroll", () => { tip.hidden = true; }, {passive: true});
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
