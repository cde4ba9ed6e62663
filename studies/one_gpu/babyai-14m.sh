# For slime's scripts/models: the policy of study.yaml, in MODELS/babyai-14m. Its config.json has the size of the vocabulary.
MODEL_ARGS=(
  --swiglu
  --num-layers 8
  --hidden-size 384
  --ffn-hidden-size 1152
  --num-attention-heads 6
  --group-query-attention
  --num-query-groups 2
  --use-rotary-position-embeddings
  --rotary-base 10000
  --disable-bias-linear
  --add-qkv-bias
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --untie-embeddings-and-output-weights
  --vocab-size "$(sed -n 's/.*"vocab_size": \([0-9]*\).*/\1/p' "${MODELS:-/root/models}/babyai-14m/config.json")"
)
