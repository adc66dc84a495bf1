"""A shop: nobody knows what its goods cost without asking."""

import random

GOODS = (
    "apron basket bell bench blanket book bottle bowl box brush bucket candle carpet chair clock "
    "coat comb cup curtain desk drum fan fork frame glove hammer hat kettle key knife ladder lamp "
    "mirror mug needle paint pan pencil piano pillow pin plate pot rope ruler saw scarf shelf shoe "
    "soap sofa spoon stool table towel toy tray vase wallet whistle"
).split()
_SOURCE = random.Random("shop")
PRICES = {item: _SOURCE.randint(11, 99) for item in GOODS}


def price(item: str) -> str:
    """Says what an item of the shop costs.

    Args:
        item: The name of the item, one word.
    """
    if item not in PRICES:
        raise ValueError(f"the shop has no {item!r}")
    return str(PRICES[item])
