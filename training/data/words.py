# ruff: noqa: SIM905
"""Word lists and `scene`, which fills the text slots of the word problems."""

import random

WOMEN = (
    "Anna Grace Rosa Tina Maria Lena Sara Emma Nora Ida Clara Julia Eva Lucy Mia Olga Vera Zoe Alice "
    "Bella Carla Dora Ella Fiona Gina Helen Irene Jane Karen Laura Nina Paula Ruth Sofia Wendy"
).split()
MEN = (
    "Tom Ben Max Paul Omar Leo Karl Hugo Ivan Sam Adam Carlos David Erik Felix Gary Henry Jack Kevin "
    "Liam Mark Noah Oscar Peter Ralph Simon Theo Victor Will Abel Bruno Dan Emil Frank Jonas"
).split()
NAMES = WOMEN + MEN
WOMEN_SET = frozenset(WOMEN)

ITEMS = tuple(
    (plural, singular)
    for singular, plural in (
        pair.split("/")
        for pair in (
            "apple/apples pear/pears orange/oranges lemon/lemons plum/plums peach/peaches cherry/cherries "
            "cookie/cookies cake/cakes muffin/muffins egg/eggs bread/breads sandwich/sandwiches candy/candies "
            "pen/pens pencil/pencils crayon/crayons book/books card/cards stamp/stamps coin/coins button/buttons "
            "marble/marbles shell/shells stone/stones toy/toys doll/dolls ball/balls kite/kites puzzle/puzzles "
            "sticker/stickers balloon/balloons flower/flowers rose/roses tulip/tulips seed/seeds nut/nuts "
            "brick/bricks nail/nails screw/screws tile/tiles candle/candles lamp/lamps cup/cups plate/plates "
            "spoon/spoons fork/forks bottle/bottles hat/hats shirt/shirts sock/socks glove/gloves scarf/scarves "
            "ribbon/ribbons bead/beads ring/rings photo/photos ticket/tickets poster/posters map/maps "
            "magazine/magazines letter/letters"
        ).split()
    )
)
BOXES = tuple(
    tuple(pair.split("/"))
    for pair in (
        "box/boxes bag/bags basket/baskets crate/crates jar/jars carton/cartons tray/trays packet/packets "
        "drawer/drawers case/cases bucket/buckets chest/chests sack/sacks tin/tins"
    ).split()
)
KIDS = "children students friends players workers boys girls cousins neighbors pupils guests kids".split()
PEOPLE = "people teachers visitors farmers men women adults families clerks drivers".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PLACES = "market shop fair school station park library museum farm garden beach harbor".split()

ADJECTIVES = (
    "silver golden red blue green white black brown old new small big bright dark quiet dusty broken "
    "hidden empty heavy hollow narrow wide cold warm wild gentle ancient winter summer northern southern"
).split()
NOUNS = (
    "lantern bridge tower river garden market clock mountain forest window harbor island castle valley "
    "mirror engine kettle anchor ladder saddle violin compass hammer needle pillow rocket saucer temple "
    "walnut zebra koala falcon badger otter salmon beetle maple cedar willow copper nickel quartz marble "
    "indigo crimson amber velvet cotton linen paper"
).split()
THINGS = (
    "code color password number address room animal name word secret sign label target badge ticket"
).split()


def scene(rng: random.Random) -> dict[str, object]:
    """Text slots of one word problem: persons A, B, C with A's pronouns, items, containers, crowd, day, place."""
    a, b, c = rng.sample(NAMES, 3)
    (items, item), (items2, item2) = rng.sample(ITEMS, 2)
    (box, boxes), (box2, boxes2) = rng.sample(BOXES, 2)
    female = a in WOMEN_SET
    return {
        "A": a,
        "B": b,
        "C": c,
        "he": "she" if female else "he",
        "He": "She" if female else "He",
        "his": "her" if female else "his",
        "him": "her" if female else "him",
        "his2": "her" if b in WOMEN_SET else "his",
        "items": items,
        "item": item,
        "items2": items2,
        "item2": item2,
        "boxes": boxes,
        "box": box,
        "boxes2": boxes2,
        "box2": box2,
        "kids": rng.choice(KIDS),
        "people": rng.choice(PEOPLE),
        "day": rng.choice(DAYS),
        "place": rng.choice(PLACES),
    }
