"""Models of diffusers in small, each with the mean squared error to a target of its output's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROWS = 5
_BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


class Denoised(nn.Module):
    """A model whose output is compared with a target."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: torch.Tensor, **values: Any) -> torch.Tensor:
        """Mean squared error."""
        found = self.model(**values, return_dict=False)[0]
        return functional.mse_loss(found, target)


def _noisy(channels: int, size: int, **more: Any) -> dict[str, Any]:
    return {"sample": torch.randn(ROWS, channels, size, size), **more}


def _conditioned(shape: tuple[int, ...], condition: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Latents and the states of an encoder, by shape without rows, and time steps if no others are given."""
    return {
        "hidden_states": torch.randn(ROWS, *shape),
        "encoder_hidden_states": torch.randn(ROWS, *condition),
        "timestep": _steps(),
        **more,
    }


def _steps() -> torch.Tensor:
    return torch.randint(1000, (ROWS,))


def _unet_2d(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = library.UNet2DModel(sample_size=16, attention_head_dim=4, **blocks, **_BLOCKS)
    return model, _noisy(3, 16, timestep=_steps())


def _unet_2d_condition(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    model = library.UNet2DConditionModel(
        sample_size=16, attention_head_dim=4, cross_attention_dim=16, **blocks, **_BLOCKS
    )
    states = torch.randn(ROWS, 6, 16)
    return model, _noisy(4, 16, timestep=_steps(), encoder_hidden_states=states)


def _unet_1d(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.UNet1DModel(
        sample_size=64,
        in_channels=2,
        out_channels=2,
        extra_in_channels=16,
        block_out_channels=(8, 8, 16),
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )
    return model, {"sample": torch.randn(ROWS, 2, 64), "timestep": _steps()}


def _autoencoder_kl(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    return library.AutoencoderKL(**blocks, **_BLOCKS), _noisy(3, 16)


def _autoencoder_tiny(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    counts = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    return library.AutoencoderTiny(**sizes, **counts), _noisy(3, 16)


def _vq_model(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    return library.VQModel(num_vq_embeddings=16, **blocks, **_BLOCKS), _noisy(3, 16)


def _transformer_2d(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.Transformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=8, norm_num_groups=4, cross_attention_dim=16
    )
    return model, {
        "hidden_states": torch.randn(ROWS, 8, 8, 8),
        "encoder_hidden_states": torch.randn(ROWS, 4, 16),
    }


def _dit(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    )
    classes = torch.randint(1000, (ROWS,))
    values = {"timestep": _steps(), "class_labels": classes}
    return model, {"hidden_states": torch.randn(ROWS, 4, 8, 8), **values}


def _pixart(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=16,
        caption_channels=16,
        norm_num_groups=4,
        use_additional_conditions=False,
    )
    return model, _conditioned(
        (4, 8, 8), (4, 16), added_cond_kwargs={"resolution": None, "aspect_ratio": None}
    )


def _sd3(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        pos_embed_max_size=16,
    )
    return model, _conditioned((4, 8, 8), (6, 16), pooled_projections=torch.randn(ROWS, 12))


def _flux(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=12,
        axes_dims_rope=(4, 4, 8),
    )
    return model, _conditioned(
        (16, 4),
        (6, 16),
        pooled_projections=torch.randn(ROWS, 12),
        timestep=torch.rand(ROWS),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(6, 3),
    )


def _cogvideox(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        max_text_seq_length=6,
    )
    return model, _conditioned((2, 4, 8, 8), (6, 16))


def _sana(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        sample_size=8,
        patch_size=1,
    )
    return model, _conditioned((4, 8, 8), (6, 8))


def _aura_flow(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pos_embed_max_size=64,
    )
    return model, _conditioned((4, 8, 8), (6, 16), timestep=torch.rand(ROWS))


def _ltx(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
        qk_norm="rms_norm_across_heads",
    )
    return model, _conditioned(
        (16, 4),
        (6, 16),
        encoder_attention_mask=torch.ones(ROWS, 6),
        timestep=torch.randint(1000, (ROWS,)),
        num_frames=1,
        height=4,
        width=4,
    )


def _prior(library: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = library.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=8, num_embeddings=6
    )
    return model, {
        "hidden_states": torch.randn(ROWS, 8),
        "timestep": _steps(),
        "proj_embedding": torch.randn(ROWS, 8),
        "encoder_hidden_states": torch.randn(ROWS, 6, 8),
    }


MODELS: dict[str, Callable[[Any], tuple[nn.Module, dict[str, Any]]]] = {
    "UNet2DModel": _unet_2d,
    "UNet2DConditionModel": _unet_2d_condition,
    "UNet1DModel": _unet_1d,
    "AutoencoderKL": _autoencoder_kl,
    "AutoencoderTiny": _autoencoder_tiny,
    "VQModel": _vq_model,
    "Transformer2DModel": _transformer_2d,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "CogVideoXTransformer3DModel": _cogvideox,
    "SanaTransformer2DModel": _sana,
    "AuraFlowTransformer2DModel": _aura_flow,
    "LTXVideoTransformer3DModel": _ltx,
    "PriorTransformer": _prior,
}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode and the arguments of its forward."""
    from tests.benchmarks.zoo.image_models import import_torchvision

    import_torchvision()
    import diffusers

    model, values = MODELS[name](diffusers)
    model.train()
    with torch.no_grad():
        shape = model.double()(**_double(values), return_dict=False)[0].shape
    return Denoised(model).train(), {"target": torch.randn(shape), **values}


def _double(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in values.items()
    }
