// The texts that are seen, each with the contrast of its colour to what lies behind it, as it is drawn: with
// the opacity of each element around it. Disabled controls count.
() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (text) => {
    if (!known.has(text)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = text;
      context.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
      known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  };
  const mix = (below, above, share) => below.map((value, i) => value + (above[i] - value) * share);
  const over = (below, [r, g, b, a]) => mix(below, [r, g, b], a);
  const drawn = (chain, below, colour) => {
    const [first, ...rest] = chain;
    const style = getComputedStyle(first);
    const ground = over(below, rgba(style.backgroundColor));
    const inner = rest.length ? drawn(rest, ground, colour) : colour ? over(ground, rgba(colour)) : ground;
    return mix(below, inner, Number(style.opacity));
  };
  const linear = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const chainOf = (element) => (element.parentElement ? [...chainOf(element.parentElement), element] : [element]);
  const isSeen = (element) => {
    const { width, height } = element.getBoundingClientRect();
    if (width < 2 || height < 2 || element.closest("option, [aria-hidden=true] svg, .spoken, noscript")) return false;
    return element.checkVisibility({ checkVisibilityCSS: true }) && !chainOf(element).some((one) => getComputedStyle(one).opacity === "0");
  };
  const found = [];
  const note = (element, text, style) => {
    const chain = chainOf(element);
    const ratio = contrast(drawn(chain, [255, 255, 255], style.color), drawn(chain, [255, 255, 255], null));
    const size = Number.parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    found.push({ text: text.trim().slice(0, 40), ratio, least: isLarge ? 3 : 4.5, where: element.className || element.id || element.tagName });
  };
  for (const element of document.body.querySelectorAll("*")) {
    const texts = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    const isField = element.matches("input, select, textarea");
    if ((!texts.length && !isField) || !isSeen(element)) continue;
    if (texts.length) note(element, texts.map(({ data }) => data).join(" "), getComputedStyle(element));
    if (isField && (element.value || element.matches("select"))) note(element, element.value, getComputedStyle(element));
    if (isField && element.placeholder && !element.value) {
      const own = getComputedStyle(element, "::placeholder");
      const [r, g, b, a] = rgba(own.color);
      const color = `rgb(${r} ${g} ${b} / ${a * Number(own.opacity)})`;
      note(element, element.placeholder, { ...own, color, fontSize: own.fontSize, fontWeight: own.fontWeight });
    }
  }
  return found;
}
