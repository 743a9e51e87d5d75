/** Images of samples: thumbnails, and runs of image tokens as one block. */

import { el, fill } from "./dom.js";
import { count } from "./text.js";
import { imagePack } from "./data.js";

/** Return the size of an image in patches and its number of tokens. */
function imageText([, tokens, rows, columns]) {
  return `image ${columns} x ${rows}, ${count(tokens, "token")}`;
}

/** Return the images of a sample as figures. */
export function imageViews(images, run) {
  if (!images?.length) return null;
  return el("div", { class: "images" }, images.map((image) => {
    const frame = el("div", { class: "frame" });
    thumbnail(image, run).then((address) => fill(frame, address
      ? el("img", { src: address, alt: imageText(image) })
      : el("span", { class: "quiet" }, "no thumbnail")));
    return el("figure", {}, frame, el("figcaption", { class: "quiet small" }, imageText(image)));
  }));
}

/** Return the thumbnail of an image as a data URL; null without one. */
async function thumbnail([, , , , pack, position], run) {
  if (pack === null || pack === undefined) return null;
  const text = (await imagePack(run, pack))[position];
  return /^[A-Za-z0-9+/=]+$/.test(text ?? "") ? `data:image/jpeg;base64,${text}` : null;
}

/** Return the image that a token belongs to, or undefined. */
export function imageAt(sample, i) {
  return sample.images?.find(([offset, tokens]) => offset <= i && i < offset + tokens);
}

/** Return the block in place of the tokens of an image. */
export function imageBlock(image) {
  return el("span", { class: "tk prompt image", data: { i: image[0] } }, `[${imageText(image)}]`);
}
