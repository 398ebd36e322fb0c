"""The village: people, places, kin and prices, generated from a seed, and the tables they come
from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

# The village: who lives in it, where, with whom and from what; all of it decided by one number.
#
# Randomness is a seeded Mersenne twister read through `random()` alone, whose sequence Python
# promises to keep; `choice` and `shuffle` make no such promise, and `hash()` differs from process
# to process.
#
# Facts fall into two halves. *Discussed* subjects are written about and asked about; *quiet* ones
# are only ever written about. The cut runs between families and between pairs of places, never
# through them, because "whose wife is she?" answers "whose husband is he?" as well.

T = TypeVar("T")

ATTRIBUTES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "person": (
            "age",
            "trade",
            "home",
            "animal",
            "taste",
            "spouse",
            "mother",
            "father",
            "sibling",
        ),
        "place": ("height", "neighbour"),
        "good": ("price", "day"),
        "feast": ("month", "ground"),
    }
)
LEAST_PEOPLE, MOST_PEOPLE = 12, 300


def stream(*key: object) -> Callable[[], float]:
    """An endless source of numbers in [0, 1) that depends on the key and on nothing else."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return random.Random(int.from_bytes(digest, "big")).random


def pick(rand: Callable[[], float], items: Sequence[T]) -> T:
    """One of the items, evenly."""
    return items[int(rand() * len(items))]


def mixed(rand: Callable[[], float], items: Iterable[T]) -> list[T]:
    """The items in a random order (Fisher and Yates)."""
    order = list(items)
    for last in range(len(order) - 1, 0, -1):
        other = int(rand() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is true in the village."""

    id: str
    kind: str
    subject: str
    attribute: str
    value: str
    quiet: bool


@dataclass(frozen=True, slots=True, eq=False)
class Entity:
    """A person, place, good or feast: the words that templates show, and the half that it is in."""

    kind: str
    words: Mapping[str, str]
    quiet: bool

    @property
    def name(self) -> str:
        """What it is called."""
        return self.words["name"]

    def facts(self) -> Iterator[Fact]:
        """What is known of it."""
        for attribute in ATTRIBUTES[self.kind]:
            if attribute in self.words:
                key = f"{self.kind}/{self.name}/{attribute}"
                value = self.words[attribute]
                yield Fact(key, self.kind, self.name, attribute, value, self.quiet)


class Village:
    """A world that a seed and a head count decide, and that nothing changes afterwards."""

    def __init__(self, seed: int, people: int = 100) -> None:
        if not LEAST_PEOPLE <= people <= MOST_PEOPLE:
            raise ValueError(
                f"a village holds {LEAST_PEOPLE} to {MOST_PEOPLE} people, not {people}"
            )
        self.seed = seed
        self.size = people
        self.name = pick(stream("village", seed), VILLAGES)
        self.places = _places(seed)
        self.goods = _goods(seed)
        self.feasts = _feasts(seed, self.places)
        self.people = _people(seed, people, self.places)

    def __repr__(self) -> str:
        return f"Village(seed={self.seed}, people={self.size})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Village) and (self.seed, self.size) == (other.seed, other.size)

    def __hash__(self) -> int:
        return hash((self.seed, self.size))

    def __reduce__(self) -> tuple[type[Village], tuple[int, int]]:
        return Village, (self.seed, self.size)

    @cached_property
    def entities(self) -> tuple[Entity, ...]:
        """Everyone and everything that facts are told of."""
        return self.people + self.places + self.goods + self.feasts

    def facts(self) -> tuple[Fact, ...]:
        """All that is true here, in a fixed order."""
        return tuple(fact for entity in self.entities for fact in entity.facts())

    def having(self, kind: str, attribute: str, quiet: bool | None = None) -> tuple[Entity, ...]:
        """The entities of a kind that have an attribute, in one half or in both."""
        return tuple(
            entity
            for entity in self.entities
            if entity.kind == kind and attribute in entity.words and quiet in (None, entity.quiet)
        )

    @cached_property
    def strangers(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names that nobody here bears: those that may be spoken of, and the quiz's own."""
        taken = {person.name for person in self.people}
        free = [name for name in sorted(all_names()) if name not in taken]
        order = mixed(stream("strangers", self.seed), free)
        third = len(order) // 3
        return tuple(order[third:]), tuple(order[:third])


def all_names() -> dict[str, bool]:
    """Every name that two syllables can make, and whether it is a woman's."""
    return {
        start + end: hers
        for start in STARTS
        for hers, ends in ((True, ENDS_HER), (False, ENDS_HIM))
        for end in ends
    }


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _entity(kind: str, words: dict[str, str], quiet: bool) -> Entity:
    return Entity(kind, MappingProxyType(words), quiet)


def _places(seed: int) -> tuple[Entity, ...]:
    rand = stream("places", seed)
    names = mixed(rand, PLACES)[:16]
    heights = mixed(rand, range(11, 100))
    return tuple(
        _entity(
            "place",
            # Neighbours face each other in pairs (0 and 1, 2 and 3): a pair is in one half.
            {"name": name, "height": str(heights[at]), "neighbour": names[at ^ 1]},
            quiet=at // 2 % 2 == 1,
        )
        for at, name in enumerate(names)
    )


def _goods(seed: int) -> tuple[Entity, ...]:
    rand = stream("goods", seed)
    goods = []
    for at, name in enumerate(mixed(rand, GOODS)[:24]):
        some = _article(name)
        words = {"name": name, "a": some, "A": some[0].upper() + some[1:]}
        words |= {"price": str(2 + int(rand() * 48)), "day": pick(rand, MARKET_DAYS)}
        goods.append(_entity("good", words, quiet=at % 2 == 1))
    return tuple(goods)


def _feasts(seed: int, places: Sequence[Entity]) -> tuple[Entity, ...]:
    rand = stream("feasts", seed)
    feasts = []
    for at, name in enumerate(mixed(rand, FEASTS)[:10]):
        words = {"name": name, "Name": name[0].upper() + name[1:]}
        words |= {"month": pick(rand, MONTHS), "ground": pick(rand, places).name}
        feasts.append(_entity("feast", words, quiet=at % 2 == 1))
    return tuple(feasts)


def _people(seed: int, count: int, places: Sequence[Entity]) -> tuple[Entity, ...]:
    rand = stream("people", seed)
    names = all_names()
    hers = mixed(rand, (name for name, female in names.items() if female))
    his = mixed(rand, (name for name, female in names.items() if not female))
    people: list[Entity] = []
    # Families of two to four are founded until the village is full; halves alternate by family.
    family = 0
    while len(people) < count:
        room = count - len(people)
        size = min(room, 2 + int(rand() * 3))
        words = _family(rand, size, hers, his, pick(rand, places).name)
        people += [_entity("person", word, quiet=family % 2 == 1) for word in words]
        family += 1
    return tuple(people)


def _family(
    rand: Callable[[], float], size: int, hers: list[str], his: list[str], home: str
) -> list[dict[str, str]]:
    """A couple with up to two children, or one alone; names are taken off the two lists."""
    elder = 42 + int(rand() * 48)
    members = []
    for at in range(size):
        female = rand() < 0.5 if at > 1 or size == 1 else at == 0
        age = elder - int(rand() * 6) if at < 2 else 14 + int(rand() * (elder - 36))
        members.append(_person(rand, (hers if female else his).pop(), female, age, home))
    if size > 1:
        wife, husband = members[0], members[1]
        wife |= {"spouse": husband["name"], "mate": "husband"}
        husband |= {"spouse": wife["name"], "mate": "wife"}
        for child in members[2:]:
            child |= {"mother": wife["name"], "father": husband["name"]}
    if size > 3:
        for one, other in (members[2:4], members[3:1:-1]):
            sister = other["He"] == "She"
            one |= {"sibling": other["name"], "sib": "sister" if sister else "brother"}
    return members


def _person(
    rand: Callable[[], float], name: str, female: bool, age: int, home: str
) -> dict[str, str]:
    trade, animal = pick(rand, TRADES), pick(rand, ANIMALS)
    return {
        "name": name,
        "age": str(age),
        "trade": trade,
        "a_trade": _article(trade),
        "home": home,
        "animal": animal,
        "an_animal": _article(animal),
        "taste": pick(rand, TASTES),
        "he": "she" if female else "he",
        "He": "She" if female else "He",
        "his": "her" if female else "his",
        "His": "Her" if female else "His",
        "child": "daughter" if female else "son",
    }


# What a village is made of before chance mixes it: syllables, trades, places, goods, feasts.
#
# Plain literals, because a reader should see the whole vocabulary at a glance; generating place
# names or dishes from syllables as well was rejected, since a made-up dish tells a reader nothing.
# People's names are made of two syllables so that a stranger's name can be built in the same way as
# a villager's.

# fmt: off
STARTS = (
    "Al", "Bran", "Cor", "Dor", "El", "Fen", "Gar", "Hal", "Ing", "Jor", "Kel", "Lin", "Mar",
    "Nor", "Os", "Pel", "Quin", "Ros", "Sel", "Tam", "Ul", "Ver", "Wil", "Yar", "Zel", "Ash",
    "Bel", "Cal", "Dun", "Eth", "Fal", "Gil", "Hob", "Ir", "Jun", "Kes", "Lam", "Mil", "Ned",
    "Per",
)
ENDS_HER = (
    "abel", "issa", "ella", "wyn", "ina", "etty", "una", "ola", "ibeth", "adine", "osie", "erra",
)
ENDS_HIM = (
    "bert", "mund", "rick", "olf", "omas", "aldo", "evin", "istan", "ander", "egar", "orin",
    "eddo",
)
# fmt: on

VILLAGES = (
    "Little Marrow",
    "Nether Plumley",
    "Wexcombe",
    "Oddington Weir",
    "Birdlip Hollow",
    "Much Thimble",
    "Sallowfield",
    "Applewick",
)
TRADES = (
    "baker",
    "blacksmith",
    "carpenter",
    "cooper",
    "weaver",
    "potter",
    "miller",
    "shepherd",
    "tailor",
    "thatcher",
    "cobbler",
    "fiddler",
    "gardener",
    "clockmaker",
    "ferryman",
    "teacher",
    "midwife",
    "basket maker",
    "beekeeper",
    "apothecary",
    "bell ringer",
    "candle maker",
    "fishmonger",
    "innkeeper",
    "stonemason",
    "glass blower",
)
ANIMALS = (
    "grey goose",
    "spotted pig",
    "lame donkey",
    "white goat",
    "tabby cat",
    "one-eyed dog",
    "brown hen",
    "tame crow",
    "black pony",
    "woolly ram",
    "barn owl",
    "small tortoise",
    "red squirrel",
    "fat rabbit",
    "old greyhound",
    "speckled duck",
    "wild ferret",
    "proud peacock",
    "quiet mule",
    "singing finch",
)
TASTES = (
    "plum cake",
    "onion soup",
    "smoked trout",
    "pickled beets",
    "barley porridge",
    "apple dumplings",
    "goat cheese",
    "mushroom pie",
    "honey biscuits",
    "roast chestnuts",
    "leek stew",
    "gooseberry jam",
    "buttered turnips",
    "ginger bread",
    "boiled eggs",
    "pear tart",
    "pea pudding",
    "salted herring",
    "walnut bread",
    "blackberry cream",
)
PLACES = (
    "Mill Lane",
    "Otter Bridge",
    "Larkfield",
    "Candle Row",
    "Fiddler's Green",
    "Saltmarsh",
    "Thistle Hill",
    "Crow Wood",
    "Bell Yard",
    "Goose Common",
    "Lantern Street",
    "Kettle Court",
    "Harrow Gate",
    "Minnow Brook",
    "Rookery Rise",
    "Plum Orchard",
    "Tanner's End",
    "Windle Top",
    "Foxglove Bank",
    "Stony Ford",
    "Pilgrim Steps",
    "Cuckoo Dell",
    "Hazel Walk",
    "Drover's Rest",
)
GOODS = (
    "jar of honey",
    "loaf of rye",
    "wheel of cheese",
    "sack of oats",
    "bar of soap",
    "ball of twine",
    "tin whistle",
    "wool blanket",
    "copper kettle",
    "clay pipe",
    "garden spade",
    "pair of boots",
    "straw hat",
    "bundle of kindling",
    "bag of nails",
    "pound of butter",
    "basket of pears",
    "wooden spoon",
    "brass lamp",
    "fishing rod",
    "pot of ink",
    "string of onions",
    "felt cap",
    "milking stool",
    "leather belt",
    "horn comb",
    "paper kite",
    "jug of cider",
)
FEASTS = (
    "the Lantern Supper",
    "the Goose Fair",
    "the Plum Feast",
    "the First Furrow",
    "the Bell Night",
    "the River Blessing",
    "the Wool Parade",
    "the Candle Walk",
    "the Long Table",
    "the Kite Morning",
    "the Apple Toast",
    "the Honey Dance",
)
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MARKET_DAYS = DAYS[:6]
