"""Short film reviews in English, praising or not. The verdict is in the grammar, not in a word.

Words of both colours stand in either kind of review: negation turns a clause, and of two clauses
that disagree the one behind "but", or outside of "although", is the verdict.
"""

from __future__ import annotations

from collections.abc import Callable

from xcloud.tasks.corpus.demo.phrases import Dice


def _words(text: str) -> list[str]:
    return [word.replace("_", " ") for word in text.split()]


SUBJECTS = _words("""
the_film the_movie the_story the_acting the_script the_plot the_music the_ending the_direction
the_dialogue the_first_half the_second_half the_cast the_photography the_pace the_humor
the_camera_work the_lead_performance the_villain the_romance the_editing the_opening_scene
the_final_act the_soundtrack the_narration the_whole_thing this_comedy this_drama this_thriller
the_production the_screenplay the_hero the_central_idea the_supporting_cast the_sequel
""")
NOUNS = _words("""
story script plot ending cast pace humor dialogue soundtrack direction acting premise style
opening finale camera_work hero villain title_song message budget title
""")
GOOD = _words("""
wonderful moving funny clever gripping charming touching witty fresh brilliant delightful warm
honest graceful inventive memorable thrilling superb sincere engaging lively smart beautiful
powerful tender elegant vivid original convincing rewarding hilarious intelligent subtle bold
""")
BAD = _words("""
dull boring clumsy shallow tedious silly predictable lifeless awkward flat bland messy stale
forgettable tiresome sloppy pointless weak painful dreary hollow confused noisy lazy ugly
pretentious tasteless unfunny implausible overlong annoying ridiculous wooden empty
""")
# Third person | bare form.
DOES_WELL = [tuple(entry.split("|")) for entry in _words("""
works|work comes_alive|come_alive holds_your_attention|hold_your_attention rings_true|ring_true
shines|shine wins_you_over|win_you_over keeps_you_guessing|keep_you_guessing
hits_the_mark|hit_the_mark makes_sense|make_sense pays_off|pay_off stays_with_you|stay_with_you
earns_its_laughs|earn_its_laughs touches_the_heart|touch_the_heart
""")]  # fmt: skip
DOES_BADLY = [tuple(entry.split("|")) for entry in _words("""
falls_apart|fall_apart drags|drag falls_flat|fall_flat runs_out_of_ideas|run_out_of_ideas
misses_the_point|miss_the_point wears_thin|wear_thin loses_its_way|lose_its_way
puts_you_to_sleep|put_you_to_sleep feels_like_homework|feel_like_homework
tries_your_patience|try_your_patience collapses|collapse insults_the_audience|insult_the_audience
""")]  # fmt: skip
EFFECTS = _words("charm surprise amuse move entertain impress convince delight engage inspire")
DEGREES = _words("very truly quite often surprisingly remarkably rather simply always - - - - -")
NEGATIONS = _words("not never hardly far_from anything_but not_at_all rarely not_really")
AUXILIARIES = _words("never does_not hardly_ever will_not")


def review(dice: Dice) -> tuple[str, bool]:
    """(text, whether it praises). Praise is drawn first, so that no form of text favours it."""
    good = dice.chance(0.5)
    return dice.weighted(FORMS)(dice, good), good


def _adjective(dice: Dice, good: bool) -> str:
    return dice.pick(GOOD if good else BAD)


def clause(dice: Dice, good: bool, subject: str | None = None) -> str:
    """A statement of one colour; in half of them a negated word of the other."""
    about = subject or dice.pick(SUBJECTS)
    turned = dice.chance(0.5)
    kind = dice.below(5)
    if kind < 3:
        if turned:
            return f"{about} is {dice.pick(NEGATIONS)} {_adjective(dice, not good)}"
        degree = dice.pick(DEGREES)
        adjective = _adjective(dice, good)
        return f"{about} is {adjective if degree == '-' else f'{degree} {adjective}'}"
    if kind == 3:
        does = dice.pick(DOES_WELL if good != turned else DOES_BADLY)
        return f"{about} {dice.pick(AUXILIARIES)} {does[1]}" if turned else f"{about} {does[0]}"
    fails = "never fails to" if good else dice.pick(("fails to", "does nothing to"))
    return f"{about} {fails} {dice.pick(EFFECTS)}"


def _plain(dice: Dice, good: bool) -> str:
    return f"{clause(dice, good)} ."


def _and(dice: Dice, good: bool) -> str:
    return f"{clause(dice, good)} , and {clause(dice, good)} ."


def _but(dice: Dice, good: bool) -> str:
    return f"{clause(dice, not good)} , but {clause(dice, good)} ."


def _although(dice: Dice, good: bool) -> str:
    word = dice.pick(("although", "even though", "while"))
    aside, verdict = clause(dice, not good), clause(dice, good)
    return f"{verdict} , {word} {aside} ." if dice.chance(0.5) else f"{word} {aside} , {verdict} ."


def _despite(dice: Dice, good: bool) -> str:
    aside = f"despite its {_adjective(dice, not good)} {dice.pick(NOUNS)}"
    verdict = clause(dice, good)
    return f"{aside} , {verdict} ." if dice.chance(0.5) else f"{verdict} , {aside} ."


def _too(dice: Dice, good: bool) -> str:
    pair = f"too {_adjective(dice, good)} to be {_adjective(dice, not good)}"
    return f"{dice.pick(SUBJECTS)} is {pair} ."


def _expected(dice: Dice, good: bool) -> str:
    subject = dice.pick(SUBJECTS)
    start = f"i expected {subject} to be {_adjective(dice, not good)}"
    return f"{start} , but {clause(dice, good, 'it')} ."


def _nobody(dice: Dice, good: bool) -> str:
    start = dice.pick(("nobody could call", "no one will find", "you would be wrong to call"))
    return f"{start} {dice.pick(SUBJECTS)} {_adjective(dice, not good)} ."


FORMS: tuple[tuple[Callable[[Dice, bool], str], float], ...] = (
    (_plain, 4.0), (_and, 2.0), (_but, 4.0), (_although, 3.0), (_despite, 2.0), (_too, 1.0),
    (_expected, 1.5), (_nobody, 1.0),
)  # fmt: skip
