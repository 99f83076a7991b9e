// What can be focused in a group is one stop of the tab key; arrow keys move inside it.
document.addEventListener("keydown", event => {
  const group = event.target.closest("[data-rove]");
  if (!group || event.ctrlKey || event.altKey || event.metaKey) return;
  const items = [...group.querySelectorAll("[tabindex]")], place = items.indexOf(event.target);
  const places = {ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: items.length - 1};
  const next = items[places[event.key]];
  if (!next) return;
  event.preventDefault();
  next.focus();
});
document.addEventListener("focusin", event => {
  const group = event.target.closest("[data-rove]");
  if (!group || !event.target.hasAttribute("tabindex")) return;
  for (const item of group.querySelectorAll("[tabindex]"))
    item.tabIndex = item === event.target ? 0 : -1;
});
