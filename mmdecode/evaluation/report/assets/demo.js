// What is pointed at or focused in a group shows its label as a tip.
const tip = document.getElementById("tip");
let shown = null;
function show(target) {
  shown = target;
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.getAttribute("aria-label");
  const box = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const above = box.top - size.height - 6;
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - size.width - 8)) + "px";
  tip.style.top = (above > 0 ? above : box.bottom + 6) + "px";
}
for (const name of ["mouseover", "click", "focusin"])
  document.addEventListener(name, event => {
    show(event.target.closest("[data-rove] [tabindex][aria-label]"));
  });
document.addEventListener("focusout", () => show(null));
document.addEventListener("scroll", () => {
  show(shown === document.activeElement ? shown : null);
}, {passive: true});

// What can be focused in a group is one stop of the tab key; arrow keys move inside it, up and down
// by as many as the group has in a row.
const members = group => [...group.querySelectorAll("[tabindex]")]
  .filter(item => item.closest("[data-rove]") === group);
document.addEventListener("keydown", event => {
  if (event.key === "Escape") show(null);
  const group = event.target.closest("[data-rove]");
  if (!group || event.ctrlKey || event.altKey || event.metaKey) return;
  const items = members(group), index = items.indexOf(event.target);
  const row = Number(group.dataset.rove) || items.length;
  const moves = {ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: items.length - 1};
  const next = items[{...moves, ArrowUp: index - row, ArrowDown: index + row}[event.key]];
  if (index < 0 || !next) return;
  event.preventDefault();
  next.focus();
});
document.addEventListener("focusin", event => {
  const group = event.target.closest("[data-rove]");
  if (!group || !event.target.hasAttribute("tabindex")) return;
  for (const item of members(group)) item.tabIndex = item === event.target ? 0 : -1;
});

for (const input of document.querySelectorAll("[data-switch]")) {
  const update = () => document.body.classList.toggle(input.dataset.switch, input.checked);
  input.addEventListener("change", update);
  update();
}

// One recording plays at a time; a word starts it there, and is marked while it is heard.
document.addEventListener("play", event => {
  for (const other of document.querySelectorAll("audio")) if (other !== event.target) other.pause();
}, true);
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
