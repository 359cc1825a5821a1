"""The Evoformer's FLOPs and bytes."""


def costs(settings):
    return None
