"""Hugging Face folder -> OpenVINO folder, with optimum-intel: python run_openvino_export.py MODEL OUT"""

from __future__ import annotations

import sys


def main() -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    model, out = sys.argv[1:]
    main_export(
        model_name_or_path=model,
        output=out,
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp32"),  # the precision of the arithmetic is chosen when it runs
        stateful=True,
        convert_tokenizer=False,
        library_name="transformers",
    )


if __name__ == "__main__":
    main()
