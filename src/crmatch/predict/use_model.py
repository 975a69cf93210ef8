"""Predict pictures with a model that crmatch exported. Prints one line per picture: path, class, confidence.

python use_model.py model.onnx PICTURES...     needs onnxruntime, numpy and Pillow
"""

import csv
import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def main() -> None:
    """Predict the pictures that the command line names."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    names, size, mode = json.loads(about["class_names"]), int(about["image_size"]), about["color_mode"]
    output = csv.writer(sys.stdout, lineterminator="\n")
    for path in sys.argv[2:]:
        try:
            picture = ImageOps.exif_transpose(Image.open(path))
        except OSError as error:
            sys.stderr.write(f"{path}: {error}\n")
            continue
        if picture.has_transparency_data:  # the background is white
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA")).convert("RGB")
        width, height = (max(size, round(side * size / min(picture.size))) for side in picture.size)
        left, top = (width - size) // 2, (height - size) // 2  # the shorter side is resized, then the center is cropped
        picture = picture.convert(mode).resize((width, height), Image.Resampling.LANCZOS)
        pixels = np.asarray(picture.crop((left, top, left + size, top + size))).reshape(1, size, size, -1)
        probabilities = session.run(None, {"images": pixels.transpose(0, 3, 1, 2)})[0][0]
        cells = [as_text(path), as_text(names[probabilities.argmax()])]
        output.writerow([*cells, f"{probabilities.max():.4f}"])


def as_text(cell: str) -> str:
    """The text with a quote before what a spreadsheet would compute, such as =1+1."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


if __name__ == "__main__":
    main()
