"""The words of codes (invitation.py): easy to say and to spell, each one unlike the others."""

WORDS = """
acid acorn acre actor adult agent album alley alpha amber anchor angle ankle apple apron arch
arena arrow artist aspen atlas attic autumn award bacon badge bagel baker balcony bamboo banana
banjo barrel basil basket beach beacon beaver bell bench berry bicycle bishop bison blanket
blossom border bottle boulder bracket branch bread breeze brick bridge bronze brush bucket
budget buffalo bundle butter button cabin cactus camel camera canal candle canoe canvas canyon
captain carbon cargo carpet carrot castle cedar cellar ceramic chalk cherry chess chimney
circle citrus clarinet cliff clover cobalt coconut coffee comet compass copper coral cotton
cousin coyote cradle crater crayon cricket crystal curtain cushion dagger daisy dancer delta
denim desert diamond dinner doctor dolphin donkey dragon drawer eagle earth echo eclipse elbow
elephant ember engine falcon farmer feather fennel ferry fiddle forest fossil fountain fox
galaxy garden garlic gazelle ginger giraffe glacier goblet guitar hammer harbor harvest hazel
helmet hermit honey horizon hotel igloo indigo island ivory jacket jaguar jasmine jigsaw jungle
kernel kettle kitchen ladder lagoon lantern lemon leopard library lizard lobster magnet mango
maple marble meadow melon mirror mosaic mountain mustard napkin needle nickel nutmeg ocean
olive onion orbit orchid otter oyster paddle palace panda paper parrot pebble pencil pepper
piano pigeon pillow planet plaza poppy potato prairie pumpkin puzzle quartz rabbit radar ribbon
river rocket saddle salmon sandal saturn scarf shadow shovel silver sparrow spider stable
sunset tablet thunder ticket tiger timber tomato trumpet tulip tunnel turtle umbrella valley
velvet violin wagon walnut willow window winter wizard yogurt zebra zigzag
""".split()
