"""One rank's part of a causal language model: a pipeline stage's tensor shard.

The last stage applies the head to the hidden states of completion tokens only and returns log-probs; other stages
return hidden states for the next. Dropout is off: the importance ratio compares two passes of one function.

Legend of shapes: U distinct tokens, B rows, L padded length, S length of this rank's part of a sequence, N completion
tokens of all rows, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from stages.engines.megatron.layer_spec import decoder_spec
from stages.engines.megatron.layout import MegatronLayout, RankCoordinates, slice_bounds
from stages.engines.megatron.model_config import ModelConfig
from stages.engines.megatron.vocab_logprobs import VocabShard, sharded_logprobs
from stages.engines.megatron.weight_map import stage_parameters


class PolicyStage(GPTModel):  # type: ignore[misc]  # megatron-core is untyped here
    """A stage that knows completion tokens; its weights are undefined until they are loaded."""

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, layout: MegatronLayout, at: RankCoordinates,
        chunk_tokens: int,
    ) -> None:  # fmt: skip
        super().__init__(
            config,
            decoder_spec(layout.stage_layers[at.stage], has_head_norms=model.has_head_norms),
            vocab_size=-(-model.vocab // layout.tp) * layout.tp,
            max_sequence_length=0,
            pre_process=at.stage == 0,
            post_process=at.stage == layout.pp - 1,
            share_embeddings_and_output_weights=model.is_tied,
            position_embedding_type="rope",
        )
        self.rotary_pos_emb.inv_freq = model.inverse_frequencies.clone()
        start, end = slice_bounds(model.vocab, at.shard, layout.tp)
        group = parallel_state.get_tensor_model_parallel_group() if layout.tp > 1 else None
        self.vocab_shard = VocabShard(first=start, size=end - start, group=group)
        self.chunk_tokens = chunk_tokens
        self.tp = layout.tp
        _mark_shards(self, model, layout, at)

    def forward(
        self,
        token_ids: Tensor,
        row_places: Tensor,
        hidden_index: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        with_entropy: bool,
    ) -> Any:  # noqa: ANN401 - see Returns
        """Compute this stage.

        Args:
            token_ids: [U].
            row_places: [B, L], places in `token_ids`; anything behind a row's end.
            hidden_index: [N], positions in the flattened [B * L].
            targets: [N].
            temperatures: [N].
            with_entropy: Whether to compute the entropy.

        Returns:
            On the last stage log-probs and entropy (None unless asked for), fp32 [N]; else hidden states [S, B, H].
        """
        width = row_places.shape[1]
        # Sequence parallelism cuts rows into equal parts; more padding on the right changes nothing.
        padding = -width % self.tp if self.config.sequence_parallel else 0
        row_places = nn.functional.pad(row_places, (0, padding))
        embedded = self.embedding(input_ids=token_ids[row_places], position_ids=None) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=embedded, attention_mask=None, rotary_pos_emb=self.rotary_pos_emb(width + padding)
        )
        if not self.post_process:
            return hidden
        index = hidden_index + hidden_index // width * padding
        states = self._completion_states(hidden, index)
        weight = self.shared_embedding_or_output_weight() if self._is_tied else self.output_layer.weight
        return sharded_logprobs(
            states, weight, targets, temperatures, self.vocab_shard,
            chunk_tokens=self.chunk_tokens, with_entropy=with_entropy,
        )  # fmt: skip

    @property
    def _is_tied(self) -> bool:
        return bool(self.share_embeddings_and_output_weights)

    def _completion_states(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Hidden states [N, H] whose gradients the backward pass adds up over the shards of the vocabulary."""
        if self.config.sequence_parallel:
            whole = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            return whole.transpose(0, 1).flatten(0, 1).index_select(0, index)
        states = hidden.transpose(0, 1).flatten(0, 1).index_select(0, index)
        return tensor_parallel.copy_to_tensor_model_parallel_region(states)


def transformer_config(
    model: ModelConfig, layout: MegatronLayout, *, dtype: torch.dtype, is_recomputing: bool, sequence_parallel: bool
) -> TransformerConfig:
    """Return megatron-core's config: no fused kernels of Apex or Transformer Engine, no dropout, sums of gradients."""
    recompute: dict[str, Any] = {}
    if is_recomputing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.has_head_norms,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_model_parallel_layout=layout.pipeline_string(),
        sequence_parallel=sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in rows and length. The dispatcher is for mixtures of experts, but megatron-core
        # refuses variable lengths with its default even in dense models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Weights come from files.
        use_cpu_initialization=True,
        perform_initialization=False,
        # Losses are divided by the counts of the whole step already: gradients are summed, not averaged.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        **recompute,
    )


def _mark_shards(stage: PolicyStage, model: ModelConfig, layout: MegatronLayout, at: RankCoordinates) -> None:
    """Say which parameters are parts of a tensor; megatron-core does so only when it initialises weights itself."""
    parameters = dict(stage.named_parameters())
    for mapped in stage_parameters(model, layout, at.stage):
        if mapped.dim is not None:
            tensor_parallel.set_tensor_model_parallel_attributes(
                tensor=parameters[mapped.name], is_parallel=True, dim=mapped.dim, stride=1
            )
