// Small things made of the page's templates.

export function make(name, className = "", text = undefined) {
  const node = document.createElement(name);
  node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

export function fromTemplate(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

export function slot(node, name) {
  return node.querySelector(`[data-slot="${name}"]`);
}

/** Show text; nothing is written where it has not changed. */
export function show(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
