"""Recording of layers and routers in vLLM's worker, for `msrl diagnose`."""

from __future__ import annotations

from typing import Any

from msrl.diagnose.recorder import Recorder, decoder_layers, first_output, layer_name, layer_output
from msrl.types import Floats

_ROUTERS = ("gate", "router")


class ForwardRecorder:
    """Methods that vLLM adds to its worker with `WeightReceiver`; `self` is that worker."""

    model_runner: Any
    _layers: Recorder
    _router_logits: Recorder
    _router_biases: dict[str, Floats]
    _features: Recorder

    def describe_model(self) -> dict[str, Any]:
        """Return dtype, dtype of the KV cache and the model's config as vLLM reads them."""
        config = self.model_runner.vllm_config
        model = config.model_config
        cache = str(config.cache_config.cache_dtype)
        return {
            "dtype": str(model.dtype).removeprefix("torch."),
            "cache_dtype": None if cache == "auto" else cache,
            "config": model.hf_config.to_dict(),
        }

    def describe_logits(self) -> str:
        """Return the dtype in which the output layer computes logits.

        Logits that a layer rounds to the dtype of the model have that dtype, even if it returns
        them in another one. All workers of an engine call it together.
        """
        import torch

        config = self.model_runner.vllm_config.model_config
        size = config.get_hidden_size()
        hidden = torch.linspace(-1, 1, size, dtype=config.dtype, device=self.model_runner.device)
        with torch.inference_mode():
            logits = self.model_runner.get_model().compute_logits(hidden[None])
        if logits is None:  # the first worker has them
            return ""
        is_rounded = torch.equal(logits.to(config.dtype).to(logits.dtype), logits)
        dtype = config.dtype if is_rounded else logits.dtype
        return str(dtype).removeprefix("torch.")

    def begin_recording(self, num_layers: int, num_experts: int) -> None:
        """Record the outputs of all layers and routers until `end_recording`."""
        model = self.model_runner.get_model()
        self._layers, self._router_logits, self._router_biases = Recorder(), Recorder(), {}
        for number, layer in decoder_layers(model, num_layers):
            name = layer_name(number)
            self._layers.watch(name, layer, layer_output)
            for inner, module in layer.named_modules() if num_experts else ():
                if inner.rpartition(".")[2] in _ROUTERS:
                    self._router_logits.watch(name, module, first_output)
                    bias = getattr(module, "e_score_correction_bias", None)
                    if bias is not None:
                        self._router_biases[name] = bias.detach().float().cpu().numpy()

    def end_recording(self) -> tuple[dict[str, Floats], dict[str, Floats], dict[str, Floats]]:
        """Return outputs of layers [T, H], logits of routers [T, E] and their biases [E]."""
        return self._layers.end(), self._router_logits.end(), self._router_biases

    def begin_features(self) -> None:
        """Record the outputs of the vision tower until `end_features`."""
        self._features = Recorder()
        tower = getattr(self.model_runner.get_model(), "visual", None)
        if tower is not None:
            self._features.watch("features", tower, first_output)

    def end_features(self) -> Floats | None:  # [F, c]
        """Return the features of images, those for deeper layers behind; None without a tower."""
        return self._features.end().get("features")
