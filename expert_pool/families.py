"""The model families that Coterie serves."""

SUPPORTED = (
    "afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "gemma4_text", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "jamba", "lfm2_moe",
    "llama4_text", "minimax", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Model types that are tested against stock; others with the same experts interface may work."""
