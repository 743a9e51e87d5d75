"""Images of vision-language models: settings of the processor, sizes in patches, and pixels.

Engine and trainer use the same pixels, so they share this code and not the image processors of
transformers and vLLM. Their outputs equal those of `Qwen2VLImageProcessorPil` of transformers 5.19.
"""
