"""A model in the browser: drop a picture, see its classes. Programs post a picture to the same address and get JSON."""

from __future__ import annotations

import threading
from io import BytesIO

import torch

from crmatch.data.folder.decode import open_picture
from crmatch.data.folder.workers import read_pictures
from crmatch.predict.model import Model
from crmatch.report.review import render_with_scripts
from crmatch.report.server import Answer, json_answer


class ModelSite:
    """The page of a model, and its answers to pictures."""

    most_bytes = 50 << 20

    def __init__(self, model: Model, name: str) -> None:
        self._model, self._name, self._lock = model, name, threading.Lock()

    def get(self, path: str, nonce: str) -> Answer | None:
        """The page."""
        values = {"title": self._name, "classes": self._model.class_names, "most_bytes": self.most_bytes}
        return None if path else Answer(render_with_scripts("serve.html", nonce, **values), "text/html; charset=utf-8")

    def post(self, path: str, body: bytes) -> Answer | None:
        """The probabilities of a picture, the highest first."""
        if path != "predict":
            return None
        model = self._model
        with open_picture(BytesIO(body)) as picture:
            pixels = read_pictures([picture], model.image_size, model.channels)
        with self._lock:
            probabilities = model.predict_probabilities(torch.from_numpy(pixels).permute(0, 3, 1, 2))[0].tolist()
        ranked = sorted(zip(model.class_names, probabilities, strict=True), key=lambda pair: -pair[1])
        return json_answer({"classes": [{"class": name, "probability": round(value, 6)} for name, value in ranked]})
