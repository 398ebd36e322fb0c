"""How a fact is told: many wordings for each attribute.

`{word}` is a word of the fact's subject. The subject comes before the value in every wording: a
reader who meets the value first has to look it up backwards, which small models cannot do (the
"reversal curse"), and what they could not learn would be counted against them as distance from the
floor.

STATEMENTS name their subject. PRONOUNS go on about a person who has just been named.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STATEMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": (
            "{name} is {age} years old.",
            "{name} turned {age} this year.",
            "At the last count {name} was {age}.",
            "{name} has seen {age} winters.",
            "On the cake for {name} there were {age} candles.",
            "{name} says that {age} is a fine age to be.",
            "The parish book gives {name} the age of {age}.",
            "Nobody would guess it, but {name} is {age}.",
            "Ask {name} how old {he} is and {he} will say {age}.",
            "{name} had a birthday and is now {age} years of age.",
        ),
        "trade": (
            "{name} is {a_trade}.",
            "{name} works as {a_trade}.",
            "{name} earns {his} bread as {a_trade}.",
            "By trade {name} is {a_trade}.",
            "{name} has been {a_trade} since {he} was young.",
            "The sign over the door of {name} says {trade}.",
            "{name} will help anyone who needs {a_trade}.",
            "{name} learned the work of {a_trade} long ago.",
            "You will find {name} busy all day, being {a_trade}.",
            "When asked for {his} job, {name} answers: {trade}.",
        ),
        "home": (
            "{name} lives at {home}.",
            "{name} has a house at {home}.",
            "The home of {name} is at {home}.",
            "Letters for {name} go to {home}.",
            "{name} sleeps every night at {home}.",
            "You can knock at the door of {name} at {home}.",
            "{name} would not live anywhere but {home}.",
            "The lamp of {name} burns late at {home}.",
            "After work {name} walks back to {home}.",
            "{name} was born far away but lives at {home} now.",
        ),
        "animal": (
            "{name} keeps {an_animal}.",
            "{name} has {an_animal}.",
            "{name} feeds {an_animal} each morning.",
            "Behind {name} there always walks {an_animal}.",
            "The animal that {name} owns is {an_animal}.",
            "{name} was seen in the rain with {an_animal}.",
            "{name} would be lost without {his} {animal}.",
            "{name} shares {his} supper with {an_animal}.",
            "The pet of {name} is {an_animal}.",
            "Last night {name} was up late looking for {his} {animal}.",
        ),
        "taste": (
            "{name} likes {taste} best.",
            "The favourite dish of {name} is {taste}.",
            "{name} would walk ten miles for {taste}.",
            "{name} always asks for {taste} on {his} birthday.",
            "Give {name} a plate of {taste} and {he} is happy.",
            "{name} says that nothing tastes better than {taste}.",
            "{name} can never say no to {taste}.",
            "What {name} loves to eat is {taste}.",
            "{name} eats {taste} whenever {he} can.",
            "The food that {name} dreams of is {taste}.",
        ),
        "spouse": (
            "{name} is married to {spouse}.",
            "The {mate} of {name} is {spouse}.",
            "{name} married {spouse} long ago.",
            "{name} dances with {his} {mate} {spouse} at every wedding.",
            "{name} shares a roof with {his} {mate}, {spouse}.",
            "{name} never goes to market without {his} {mate} {spouse}.",
            "{name} gave {his} heart to {spouse}, now {his} {mate}.",
            "The one {name} took for {mate} is {spouse}.",
        ),
        "mother": (
            "The mother of {name} is {mother}.",
            "{name} has {mother} for a mother.",
            "{name} learned to sing from {his} mother {mother}.",
            "{name} is the {child} of {mother}.",
            "{name} has the eyes of {his} mother, {mother}.",
            "Every Sunday {name} visits {his} mother, who is {mother}.",
        ),
        "father": (
            "The father of {name} is {father}.",
            "{name} has {father} for a father.",
            "{name} learned to whistle from {his} father {father}.",
            "{name} is the {child} of {father}.",
            "{name} has the nose of {his} father, {father}.",
            "Every Sunday {name} visits {his} father, who is {father}.",
        ),
        "sibling": (
            "The {sib} of {name} is {sibling}.",
            "{name} has a {sib} called {sibling}.",
            "{name} grew up with {his} {sib} {sibling}.",
            "{name} quarrels with nobody but {his} {sib}, {sibling}.",
            "{name} and {his} {sib} {sibling} laugh alike.",
            "{name} writes every week to {his} {sib}, who is {sibling}.",
        ),
        "height": (
            "{name} stands {height} feet above the river.",
            "{name} is {height} feet high.",
            "The height of {name} is {height} feet.",
            "From {name} down to the river it is {height} feet.",
            "The stone at {name} is marked {height} feet.",
            "To reach {name} one climbs {height} feet from the water.",
        ),
        "neighbour": (
            "{name} lies next to {neighbour}.",
            "{name} is right beside {neighbour}.",
            "The nearest place to {name} is {neighbour}.",
            "A step from {name} and you are at {neighbour}.",
            "{name} has {neighbour} for a neighbour.",
            "From {name} you can throw a stone to {neighbour}.",
        ),
        "price": (
            "{A} costs {price} pence.",
            "The price of {a} is {price} pence.",
            "{A} can be had for {price} pence.",
            "For {a} they ask {price} pence.",
            "Whoever wants {a} pays {price} pence.",
            "Nobody sells {a} for less than {price} pence.",
        ),
        "day": (
            "{A} is sold on {day}.",
            "To buy {a}, come on {day}.",
            "The day for buying {a} is {day}.",
            "{A} is on the stalls every {day}.",
            "If you want {a}, wait for {day}.",
            "The market has {a} only on {day}.",
        ),
        "month": (
            "{Name} is held in {month}.",
            "{Name} comes round every {month}.",
            "We keep {name} in {month}.",
            "The month of {name} is {month}.",
            "For {name} the bells ring in {month}.",
            "Children wait for {name} until {month}.",
        ),
        "ground": (
            "{Name} takes place at {ground}.",
            "For {name} everyone goes to {ground}.",
            "The tables for {name} are set up at {ground}.",
            "{Name} is kept at {ground}.",
            "The ground for {name} is {ground}.",
            "You will hear {name} from far away at {ground}.",
        ),
    }
)

PRONOUNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": (
            "{He} is {age} years old.",
            "{He} is {age} and not ashamed of it.",
            "{His} age is {age}.",
            "{He} has lived {age} years.",
            "{He} is {age} this year.",
            "{He} was born {age} years ago.",
        ),
        "trade": (
            "{He} is {a_trade}.",
            "{He} works as {a_trade}.",
            "{His} trade is that of {a_trade}.",
            "{He} makes {his} living as {a_trade}.",
            "{He} has always been {a_trade}.",
            "{His} work is that of {a_trade}.",
        ),
        "home": (
            "{He} lives at {home}.",
            "{His} home is at {home}.",
            "{He} has a small house at {home}.",
            "{His} door is at {home}.",
            "{He} sleeps at {home}.",
            "{He} is at home at {home}.",
        ),
        "animal": (
            "{He} keeps {an_animal}.",
            "{His} pet is {an_animal}.",
            "{He} owns {an_animal}.",
            "{He} goes nowhere without {an_animal}.",
            "{He} has {an_animal}.",
            "{He} is fond of {his} {animal}.",
        ),
        "taste": (
            "{He} likes {taste} best.",
            "{His} favourite food is {taste}.",
            "{He} would give a good deal for {taste}.",
            "{He} eats {taste} on Sundays.",
            "{He} loves {taste}.",
            "{He} never tires of {taste}.",
        ),
        "spouse": (
            "{He} is married to {spouse}.",
            "{His} {mate} is {spouse}.",
            "{He} has {spouse} for a {mate}.",
            "{He} and {his} {mate} {spouse} are seldom apart.",
        ),
        "mother": (
            "{His} mother is {mother}.",
            "{He} has {mother} for a mother.",
            "{He} has the voice of {his} mother {mother}.",
        ),
        "father": (
            "{His} father is {father}.",
            "{He} has {father} for a father.",
            "{He} has the hands of {his} father {father}.",
        ),
        "sibling": (
            "{His} {sib} is {sibling}.",
            "{He} has a {sib}, {sibling}.",
            "{He} plays cards with {his} {sib} {sibling}.",
        ),
    }
)
