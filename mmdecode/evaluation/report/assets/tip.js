const tip = document.getElementById("tip");
function show(event) {
  const target = event.target.closest(".token[aria-label], .pass");
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.getAttribute("aria-label");
  const box = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const above = box.top - size.height - 6;
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - size.width - 8)) + "px";
  tip.style.top = (above > 0 ? above : box.bottom + 6) + "px";
}
for (const name of ["mouseover", "click", "focusin"]) document.addEventListener(name, show);
document.addEventListener("scroll", () => { tip.hidden = true; }, {passive: true});
