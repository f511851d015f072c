"""The words of the demo corpus as plain data, commonest first. No grammar lives here.

Nouns: "libro.m book" (gender, English, "/plural" where irregular); "agua.f*": takes "el" in the
singular; people: "profesor,profesora teacher". "_" stands for a space.
Verbs: Spanish [+ preposition] | English [past participle] | subjects | object classes or "-".
    "look_for": inflect the first word; "turn~on": a pronoun stands between.
    subjects: p people, a animals. After "=": s stative (no preterite, no progressive),
    c no object pronoun.
"""

PEOPLE = """
profesor,profesora teacher; médico,médica doctor; niño,niña boy,girl; vecino,vecina neighbor;
amigo,amiga friend; hombre,mujer man/men,woman/women; estudiante student; abogado,abogada lawyer;
jefe,jefa boss; director,directora director; enfermero,enfermera nurse;
ingeniero,ingeniera engineer;
cocinero,cocinera cook; escritor,escritora writer; cliente customer;
camarero,camarera waiter,waitress;
compañero,compañera classmate; periodista journalist; artista artist; cantante singer;
actor,actriz actor,actress; rey,reina king,queen; presidente,presidenta president;
juez,jueza judge; alcalde,alcaldesa mayor; ladrón,ladrona thief/thieves; bailarín,bailarina dancer;
pintor,pintora painter; secretario,secretaria secretary; turista tourist; dentista dentist;
príncipe,princesa prince,princess; bombero,bombera firefighter; soldado,soldado soldier;
piloto pilot; científico,científica scientist; conductor,conductora driver; testigo witness;
panadero,panadera baker; granjero,granjera farmer; carpintero,carpintera carpenter;
peluquero,peluquera hairdresser; jugador,jugadora player; entrenador,entrenadora coach;
traductor,traductora translator; arquitecto,arquitecta architect; guía guide;
extranjero,extranjera foreigner; desconocido,desconocida stranger;
anciano,anciana old_man/old_men,old_woman/old_women;
capitán,capitana captain; marinero,marinera sailor; vendedor,vendedora seller;
invitado,invitada guest;
mago,maga magician; payaso,payasa clown; espía spy; dueño,dueña owner; poeta poet;
farmacéutico,farmacéutica pharmacist; bibliotecario,bibliotecaria librarian;
electricista electrician;
viajero,viajera traveler; campeón,campeona champion; heredero,heredera heir,heiress;
ministro,ministra minister; novelista novelist; pianista pianist; violinista violinist;
taxista taxi_driver; cirujano,cirujana surgeon; fotógrafo,fotógrafa photographer;
adulto,adulta adult;
psicólogo,psicóloga psychologist; economista economist; jardinero,jardinera gardener;
pescador,pescadora fisherman/fishermen,fisherwoman/fisherwomen; colega colleague;
monje,monja monk,nun; prisionero,prisionera prisoner; detective detective; mendigo,mendiga beggar;
lector,lectora reader; dibujante cartoonist; candidato,candidata candidate; gemelo,gemela twin;
"""

FAMILY = """
hermano,hermana brother,sister; padre,madre father,mother; hijo,hija son,daughter;
abuelo,abuela grandfather,grandmother; primo,prima cousin; tío,tía uncle,aunt;
marido,esposa husband,wife; sobrino,sobrina nephew,niece; novio,novia boyfriend,girlfriend;
nieto,nieta grandson,granddaughter; suegro,suegra father-in-law,mother-in-law;
cuñado,cuñada brother-in-law,sister-in-law; padrino,madrina godfather,godmother
"""
# Masculine plurals that mean both sexes in Spanish.
FAMILY_PLURAL = {"padre": "parents", "hijo": "children", "abuelo": "grandparents"}
ONLY_SINGULAR = (
    "madre marido esposa novio novia suegro suegra cuñado cuñada padrino madrina".split()
)

NOUNS = {
    "animal": """
perro.m dog; gato.m cat; caballo.m horse; pájaro.m bird; vaca.f cow; ratón.m mouse/mice;
gallina.f hen; oveja.f sheep/sheep; cerdo.m pig; pato.m duck; conejo.m rabbit; león.m lion;
tigre.m tiger; oso.m bear; lobo.m wolf/wolves; zorro.m fox; mono.m monkey; elefante.m elephant;
serpiente.f snake; tortuga.f turtle; cabra.f goat; burro.m donkey; águila.f* eagle; rana.f frog;
mariposa.f butterfly; abeja.f bee; mosca.f fly; araña.f spider; delfín.m dolphin; ballena.f whale;
tiburón.m shark; paloma.f pigeon; loro.m parrot; ciervo.m deer/deer; jirafa.f giraffe;
camello.m camel; hormiga.f ant; búho.m owl; cachorro.m puppy; gorrión.m sparrow; toro.m bull;
ardilla.f squirrel; cangrejo.m crab; canguro.m kangaroo; cisne.m swan; lagarto.m lizard;
pavo.m turkey;
""",
    "fruit": """
manzana.f apple; naranja.f orange; plátano.m banana; huevo.m egg; tomate.m tomato; patata.f potato;
limón.m lemon; fresa.f strawberry; pera.f pear; cebolla.f onion; zanahoria.f carrot;
cereza.f cherry;
melón.m melon; sandía.f watermelon; piña.f pineapple; pimiento.m pepper; seta.f mushroom;
galleta.f cookie; pastel.m cake; bocadillo.m sandwich; melocotón.m peach; higo.m fig;
nuez.f walnut;
almendra.f almond; ciruela.f plum; pepino.m cucumber; aceituna.f olive; calabaza.f pumpkin;
frambuesa.f raspberry; caramelo.m candy; empanada.f pie; hamburguesa.f hamburger;
""",
    "food": """
pan.m bread; carne.f meat; arroz.m rice; queso.m cheese; pescado.m fish; pollo.m chicken;
sal.f salt;
azúcar.m sugar; mantequilla.f butter; jamón.m ham; chocolate.m chocolate; miel.f honey;
sopa.f soup;
ensalada.f salad; mermelada.f jam; aceite.m oil; harina.f flour; ajo.m garlic; pasta.f pasta;
lechuga.f lettuce; maíz.m corn; vinagre.m vinegar; helado.m ice_cream; espinaca.f spinach;
""",
    "drink": """
agua.f* water; café.m coffee; leche.f milk; vino.m wine; té.m tea; cerveza.f beer; zumo.m juice;
limonada.f lemonade; champán.m champagne;
""",
    "clothes": """
camisa.f shirt; zapato.m shoe; abrigo.m coat; vestido.m dress; sombrero.m hat; falda.f skirt;
chaqueta.f jacket; corbata.f tie; bufanda.f scarf/scarves; guante.m glove; calcetín.m sock;
cinturón.m belt; bota.f boot; jersey.m sweater; gorra.f cap; uniforme.m uniform;
camiseta.f T-shirt;
impermeable.m raincoat; sandalia.f sandal; pañuelo.m handkerchief; chaleco.m vest;
delantal.m apron;
anillo.m ring; collar.m necklace; pulsera.f bracelet; pendiente.m earring; zapatilla.f slipper;
""",
    "readable": """
libro.m book; carta.f letter; periódico.m newspaper; revista.f magazine; novela.f novel;
poema.m poem;
artículo.m article; cuento.m tale; informe.m report; mensaje.m message; diario.m diary/diaries;
diccionario.m dictionary; nota.f note; contrato.m contract; receta.f recipe; mapa.m map;
manuscrito.m manuscript; folleto.m brochure; biografía.f biography; capítulo.m chapter;
ensayo.m essay;
""",
    "object": """
llave.f key; teléfono.m phone; reloj.m watch; botella.f bottle; caja.f box; bolsa.f bag;
cámara.f camera;
paraguas.m umbrella; lápiz.m pencil; plato.m plate; taza.f cup; vaso.m glass;
cuchillo.m knife/knives;
cuchara.f spoon; tenedor.m fork; cuaderno.m notebook; maleta.f suitcase; lámpara.f lamp;
espejo.m mirror;
pelota.f ball; juguete.m toy; muñeca.f doll; cuadro.m painting; foto.f photo; radio.f radio;
ordenador.m computer; cartera.f wallet; mochila.f backpack; sobre.m envelope; sello.m stamp;
moneda.f coin; billete.m ticket; regalo.m gift; flor.f flower; vela.f candle; cuerda.f rope;
martillo.m hammer; escalera.f ladder; cesta.f basket; manta.f blanket; almohada.f pillow;
toalla.f towel;
jarrón.m vase; guitarra.f guitar; piano.m piano; violín.m violin; flauta.f flute; tambor.m drum;
trompeta.f trumpet; bandera.f flag; pincel.m brush; aguja.f needle; botón.m button; peine.m comb;
impresora.f printer; pantalla.f screen; teclado.m keyboard; linterna.f flashlight;
tarjeta.f card; pasaporte.m passport; documento.m document; paquete.m package; herramienta.f tool;
máquina.f machine; motor.m engine; rueda.f wheel; espada.f sword; corona.f crown;
tesoro.m treasure;
estatua.f statue; alfombra.f carpet; cortina.f curtain; sartén.f frying_pan; olla.f pot;
horno.m oven;
microscopio.m microscope; telescopio.m telescope; cohete.m rocket; globo.m balloon;
""",
    "furniture": """
mesa.f table; silla.f chair; cama.f bed; puerta.f door; ventana.f window; sofá.m sofa;
armario.m closet;
estante.m shelf/shelves; escritorio.m desk; nevera.f refrigerator; cajón.m drawer; banco.m bench;
suelo.m floor; pared.f wall; techo.m roof; chimenea.f fireplace; bañera.f bathtub;
sillón.m armchair;
""",
    "vehicle": """
coche.m car; bicicleta.f bicycle; tren.m train; autobús.m bus/buses; avión.m plane; barco.m ship;
camión.m truck; moto.f motorcycle; taxi.m taxi; furgoneta.f van; helicóptero.m helicopter;
tranvía.m streetcar; carro.m cart; velero.m sailboat; ambulancia.f ambulance; tractor.m tractor;
""",
    "media": """
película.f movie; canción.f song; obra.f play; partido.m game; programa.m program;
concierto.m concert;
baile.m dance; carrera.f race; fiesta.f party; boda.f wedding; exposición.f exhibition;
desfile.m parade;
""",
    "idea": """
problema.m problem; pregunta.f question; respuesta.f answer; idea.f idea; plan.m plan;
historia.f story;
decisión.f decision; secreto.m secret; error.m mistake; sueño.m dream; viaje.m trip;
proyecto.m project;
regla.f rule; razón.f reason; verdad.f truth; mentira.f lie; palabra.f word; lección.f lesson;
oferta.f offer; excusa.f excuse; explicación.f explanation; teoría.f theory; ley.f law;
duda.f doubt;
promesa.f promise; propuesta.f proposal; opinión.f opinion; oportunidad.f opportunity;
examen.m exam;
experimento.m experiment; reunión.f meeting; entrevista.f interview; tarea.f task;
costumbre.f custom;
descubrimiento.m discovery; invento.m invention; consecuencia.f consequence; solución.f solution;
ejercicio.m exercise; ventaja.f advantage; desventaja.f disadvantage; cambio.m change;
riesgo.m risk;
""",
    "place": """
casa.f house; escuela.f school; parque.m park; tienda.f store; restaurante.m restaurant;
hospital.m hospital;
calle.f street; playa.f beach; ciudad.f city; pueblo.m town; iglesia.f church; museo.m museum;
biblioteca.f library; oficina.f office; jardín.m garden; estación.f station; mercado.m market;
habitación.f room; cocina.f kitchen; hotel.m hotel; puente.m bridge; plaza.f square;
teatro.m theater;
cine.m movie_theater; aeropuerto.m airport; universidad.f university; fábrica.f factory;
granja.f farm;
bosque.m forest; río.m river; montaña.f mountain; lago.m lake; isla.f island; castillo.m castle;
puerto.m port; torre.f tower; palacio.m palace; farmacia.f pharmacy; panadería.f bakery;
piscina.f pool;
aula.f* classroom; baño.m bathroom; sótano.m basement; balcón.m balcony; estadio.m stadium;
zoológico.m zoo;
desierto.m desert; valle.m valley; cueva.f cave; cárcel.f jail; gimnasio.m gym; templo.m temple;
laboratorio.m laboratory; aldea.f village; esquina.f corner; pasillo.m hallway; selva.f jungle;
cementerio.m cemetery; campamento.m camp; catedral.f cathedral; volcán.m volcano;
fuente.f fountain;
librería.f bookstore; juzgado.m courthouse; ayuntamiento.m town_hall; supermercado.m supermarket;
""",
    "plant": """
árbol.m tree; rosa.f rose; planta.f plant; hierba.f herb; arbusto.m bush; pino.m pine_tree;
tulipán.m tulip; girasol.m sunflower; hoja.f leaf/leaves; rama.f branch; semilla.f seed;
""",
    "payable": "cuenta.f bill; alquiler.m rent; cena.f dinner; comida.f meal; deuda.f debt; "
    "multa.f fine",
    "body": """
mano.f hand; cabeza.f head; pierna.f leg; brazo.m arm; espalda.f back; ojo.m eye; rodilla.f knee;
pie.m foot/feet; diente.m tooth/teeth; dedo.m finger; cuello.m neck; garganta.f throat;
hombro.m shoulder;
estómago.m stomach; oído.m ear; codo.m elbow; tobillo.m ankle;
""",
    "subject": """
inglés.m English; español.m Spanish; francés.m French; alemán.m German; música.f music;
historia.f history;
química.f chemistry; física.f physics; chino.m Chinese; italiano.m Italian; japonés.m Japanese;
medicina.f medicine; arte.m art; biología.f biology; ruso.m Russian; árabe.m Arabic; derecho.m law;
filosofía.f philosophy; geografía.f geography; latín.m Latin; portugués.m Portuguese;
poesía.f poetry;
""",
    "sport": """
fútbol.m soccer; tenis.m tennis; baloncesto.m basketball; ajedrez.m chess; béisbol.m baseball;
golf.m golf; voleibol.m volleyball; dominó.m dominoes; balonmano.m handball;
""",
}  # fmt: skip

# More classes, over nouns that have their word above.
CLASSES = {
    "writable": "carta libro novela poema artículo cuento informe mensaje nota receta ensayo "
    "biografía",
    "openable": "puerta ventana caja libro botella carta maleta paquete sobre cajón armario "
    "bolsa tienda "
    "mochila nevera regalo cuaderno paraguas",
    "closeable": "puerta ventana caja libro maleta cajón armario tienda oficina fábrica mochila "
    "cuaderno",
    "cleanable": "casa habitación cocina mesa coche ventana zapato baño suelo oficina espejo "
    "bota jardín "
    "calle horno bañera escalera alfombra pantalla",
    "washable": "camisa coche plato taza vaso falda manta vestido toalla jersey calcetín "
    "cortina camiseta "
    "olla sartén tenedor cuchara",
    "cuttable": "pan carne queso papel cuerda pastel manzana cebolla melón árbol flor rama rosa "
    "jamón",
    "breakable": "plato taza vaso ventana botella silla espejo juguete lámpara jarrón reloj "
    "puerta "
    "teléfono promesa ley",
    "repairable": "coche reloj bicicleta puerta techo radio máquina motor ordenador ventana "
    "lámpara silla "
    "barco cámara impresora teléfono camión horno puente rueda",
    "paintable": "puerta casa pared silla cuadro ventana mesa barco techo armario escuela",
    "buildable": "casa puente escuela torre hospital iglesia castillo barco templo hotel "
    "fábrica museo "
    "palacio estadio catedral",
    "drawable": "mapa caballo flor árbol casa gato puente castillo barco montaña mariposa "
    "dragón plano",
    "switch": "lámpara radio ordenador motor horno pantalla máquina vela linterna impresora",
    "hangable": "cuadro abrigo foto lámpara espejo chaqueta camisa bandera mapa cortina toalla",
    "fillable": "vaso botella taza cesta caja bañera bolsa jarrón olla piscina globo",
    "movable": "mesa silla caja cama sofá piano armario escritorio coche sillón nevera",
    "dish": "sopa cena pescado pollo arroz pasta carne comida patata hamburguesa espinaca",
    "event": "partido clase reunión viaje fiesta trabajo carrera proyecto concierto examen "
    "exposición",
    "instrument": "piano guitarra violín flauta tambor trompeta",
    "cookpot": "sopa arroz pasta carne pescado",
    "drivable": "coche camión autobús taxi furgoneta tranvía ambulancia tractor",
    "boardable": "tren autobús avión barco taxi tranvía",
    "waited": "tren autobús taxi carta respuesta avión regalo",
    "crossable": "calle río puente plaza desierto bosque lago",
    "growable": "árbol flor rosa patata tomate planta tulipán cebolla girasol lechuga",
    "rentable": "coche casa bicicleta barco habitación oficina furgoneta bicicleta",
    "document": "carta contrato documento libro informe manuscrito mensaje poema",
    "winnable": "partido carrera premio concurso medalla batalla guerra",
    "stage": "película obra partido programa concierto exposición boda carrera desfile",
    "climbable": "montaña escalera torre árbol volcán",
    "walkable": "parque calle playa bosque jardín ciudad plaza pueblo",
    "swimmable": "río lago piscina",
    "needed": "ayuda dinero tiempo llave paraguas médico coche trabajo consejo descanso permiso",
    "request": "ayuda dinero cuenta permiso café cerveza perdón",
    "music": "canción concierto música radio noticia",
    "sound": "canción ruido voz pájaro perro música grito tren piano",
    "victory": "cumpleaños victoria boda aniversario",
    "attended": "reunión clase fiesta boda concierto exposición conferencia",
    "carried": "caja maleta bolsa mochila cesta paquete botella piano escalera mesa bandera",
    "told": "historia cuento verdad mentira secreto sueño noticia chiste",
    "song": "canción",
    "problem": "problema",
    "answerable": "carta pregunta mensaje",
    "collection": "sello moneda reloj muñeca botella mapa cuadro mariposa",
    "made": "pastel ensalada café cena sopa empanada error cambio experimento",
    "prey": "gato ratón pájaro conejo pelota pato mosca oveja gallina mariposa rana ardilla",
}
# Nouns that only the classes above use.
MORE_NOUNS = """
papel.m! paper; trabajo.m job; clase.f class/classes; ayuda.f! help; dinero.m! money;
tiempo.m! time;
consejo.m! advice; permiso.m! permission; perdón.m! forgiveness; premio.m prize; medalla.f medal;
batalla.f battle; guerra.f war; concurso.m contest; ruido.m noise; voz.f voice; grito.m scream;
cumpleaños.m birthday; victoria.f victory; aniversario.m anniversary; conferencia.f lecture;
noticia.f! news; chiste.m joke; dragón.m dragon; plano.m blueprint; descanso.m rest;
"""

VERBS = """
comprar | buy bought bought | p | object clothes fruit food readable vehicle drink furniture
ver | see saw seen =c | pa | people family animal object place media vehicle
comer | eat ate eaten | pa | fruit food dish
leer | read read read | p | readable
tener | have had had =sc | p | animal idea object vehicle readable
buscar | look_for | p | object clothes people animal place
querer | want =sc | p | object clothes vehicle animal fruit drink food
escribir | write wrote written | p | writable
abrir | open | p | openable
beber | drink drank drunk | pa | drink
encontrar | find found found | p | object clothes animal people idea
cerrar | close | p | closeable
vender | sell sold sold | p | vehicle object clothes fruit furniture readable
perder | lose lost lost | p | object clothes
conocer | know knew known =s | p | people city
ayudar | help | p | people family
visitar | visit | p | people family place city country
llamar | call | p | people family
esperar | wait_for | p | people family waited
limpiar | clean | p | cleanable
usar | use | p | object
necesitar | need =s | p | needed object clothes
hacer | make made made =c | p | made
mirar | look_at | pa | people animal object place
escuchar | listen_to | p | music people
romper | break broke broken | pa | breakable
preparar | prepare | p | dish
pagar | pay_for paid paid | p | clothes object fruit
invitar | invite | p | people family
recordar | remember =s | p | idea people
olvidar | forget forgot forgotten | p | object clothes idea
aprender | learn | p | subject
estudiar | study | p | subject
entender | understand understood understood =s | p | idea
reparar | repair | p | repairable
lavar | wash | p | washable
cocinar | cook | p | dish
cortar | cut cut cut | p | cuttable
pintar | paint | p | paintable
construir | build built built | p | buildable
dibujar | draw drew drawn | p | drawable
encender | turn~on | p | switch
apagar | turn~off | p | switch
llevar | wear wore worn =c | p | clothes
cargar | carry | p | carried
traer | bring brought brought | p | food drink object fruit
recibir | receive | p | readable object
enviar | send sent sent | p | readable object
elegir | choose chose chosen | p | clothes object readable vehicle
devolver | return | p | object readable clothes
terminar | finish | p | writable event
empezar | start | p | event writable
ganar | win won won | p | winnable
robar | steal stole stolen | p | object vehicle clothes
tirar | throw~away threw thrown | p | object clothes readable
esconder | hide hid hidden | p | object readable
seguir | follow | pa | people animal
perseguir | chase | pa | people prey
atrapar | catch caught caught | pa | prey
morder | bite bit bitten | a | people prey
odiar | hate =s | p | people city subject
amar | love =s | p | family city country
admirar | admire =s | p | people family
respetar | respect =s | p | people family
saludar | greet | p | people family
abrazar | hug | p | family people
besar | kiss | p | family
despertar | wake~up woke woken | pa | family people
acompañar | accompany | p | people family
cuidar | take_care_of took taken | p | family animal plant
proteger | protect | pa | family people animal
defender | defend | p | people family idea
criticar | criticize | p | people idea media
evitar | avoid | p | people idea
explicar | explain | p | idea
resolver | solve | p | problem
aceptar | accept | p | idea
rechazar | reject | p | idea
descubrir | discover | p | idea place
imaginar | imagine | p | idea
cambiar | change | p | idea
tocar | play | p | instrument
cantar | sing sang sung | p | song
colgar | hang hung hung | p | hangable
llenar | fill | p | fillable
vaciar | empty | p | fillable
mover | move | p | movable
empujar | push | p | movable
levantar | lift | p | carried
plantar | plant | p | growable
regar | water | p | plant growable
alquilar | rent | p | rentable
conducir | drive drove driven | p | drivable
aparcar | park | p | drivable
traducir | translate | p | writable
corregir | correct | p | writable
publicar | publish | p | writable
firmar | sign | p | document
copiar | copy | p | document
celebrar | celebrate | p | victory
preferir | prefer =s | p | fruit drink food media
pedir | ask_for | p | request
probar | taste | p | food fruit dish drink
calentar | heat | p | dish drink
servir | serve | p | dish drink
medir | measure | p | furniture object
cruzar | cross | pa | crossable
contar | tell told told =c | p | told
recoger | pick~up | p | object clothes fruit
entregar | hand~in | p | document
examinar | examine | p | object document people
fotografiar | photograph | p | people animal place
observar | observe | pa | people animal
arreglar | fix | p | repairable
quemar | burn | p | document dish
cubrir | cover | p | furniture object
dañar | damage | p | repairable
grabar | record | p | media
interpretar | interpret | p | idea
analizar | analyze | p | idea
organizar | organize | p | event
cancelar | cancel | p | event
interrumpir | interrupt | p | event people
coleccionar | collect =c | p | collection
alimentar | feed fed fed | p | animal
domesticar | tame | p | animal
salvar | save | p | people animal family
castigar | punish | p | people family
perdonar | forgive forgave forgiven | p | people family
contratar | hire | p | people
despedir | fire | p | people
entrevistar | interview | p | people
arrestar | arrest | p | people
molestar | bother | pa | people family
engañar | deceive | p | people family
felicitar | congratulate | p | people family
consultar | consult | p | people readable
pensar en | think_about thought thought | p | idea family people
hablar de | talk_about | p | idea media people
hablar con | talk_to | p | people family
soñar con | dream_about | p | place vehicle animal people
casarse con | marry | p | people
quejarse de | complain_about | p | idea people
despedirse de | say_goodbye_to said said | p | people family
preocuparse por | worry_about | p | family idea
contar con | count_on =c | p | family people
confiar en | trust =s | p | people family
creer en | believe_in =s | p | people idea
depender de | depend_on =s | p | family people
luchar contra | fight_against fought fought | p | people idea
votar por | vote_for | p | people
responder a | answer | p | answerable
jugar a | play | p | sport
asistir a | attend | p | attended
participar en | take_part_in took taken | p | event
disfrutar de | enjoy | p | media drink
subir a | get_on got gotten | p | boardable
bajar de | get_off got gotten | p | boardable
entrar en | enter | pa | place
salir de | leave left left | pa | place
ir a | go_to went gone | pa | place
llegar a | arrive_at | p | place
volver a | return_to | pa | place city
viajar a | travel_to | p | city country
mudarse a | move_to | p | city country
vivir en | live_in | p | city country
caminar por | walk_through | pa | walkable
correr por | run_through ran run | pa | walkable
nadar en | swim_in swam swum | pa | swimmable
escapar de | escape_from | pa | place people
acercarse a | approach | pa | people place animal
dormir | sleep slept slept | pa | -
correr | run ran run | pa | -
trabajar | work | p | -
hablar | speak spoke spoken | p | -
llorar | cry | p | -
nadar | swim swam swum | pa | -
caminar | walk | pa | -
bailar | dance | p | -
cantar | sing sang sung | p | -
gritar | shout | p | -
viajar | travel | p | -
descansar | rest | pa | -
cocinar | cook | p | -
estudiar | study | p | -
fumar | smoke | p | -
mentir | lie | p | -
esperar | wait | pa | -
llegar | arrive | pa | -
salir | go_out went gone | pa | -
entrar | come_in came come | pa | -
volver | come_back came come | pa | -
crecer | grow_up grew grown | p | -
caer | fall fell fallen | pa | -
desaparecer | disappear | pa | -
aparecer | appear | pa | -
jugar | play | pa | -
desayunar | have_breakfast had had | p | -
almorzar | have_lunch had had | p | -
cenar | have_dinner had had | p | -
pasear | go_for_a_walk went gone | p | -
levantarse | get_up got gotten | p | -
acostarse | go_to_bed went gone | p | -
ducharse | take_a_shower took taken | p | -
vestirse | get_dressed got gotten | p | -
sentarse | sit_down sat sat | pa | -
despertarse | wake_up woke woken | pa | -
dormirse | fall_asleep fell fallen | pa | -
quedarse | stay | pa | -
irse | leave left left | pa | -
divertirse | have_fun had had | p | -
aburrirse | get_bored got gotten | p | -
perderse | get_lost got gotten | pa | -
enojarse | get_angry got gotten | p | -
casarse | get_married got gotten | p | -
mudarse | move | p | -
relajarse | relax | p | -
esconderse | hide hid hidden | pa | -
bañarse | take_a_bath took taken | p | -
afeitarse | shave | p | -
caerse | fall_down fell fallen | pa | -
resbalar | slip | pa | -
tropezar | trip | p | -
toser | cough | p | -
estornudar | sneeze | pa | -
bostezar | yawn | pa | -
suspirar | sigh | p | -
esquiar | ski | p | -
patinar | skate | p | -
pescar | fish | p | -
rezar | pray | p | -
respirar | breathe | pa | -
temblar | tremble | pa | -
desmayarse | faint | p | -
emigrar | emigrate | p | -
madrugar | get_up_early got gotten | p | -
exagerar | exaggerate | p | -
dudar | hesitate | p | -
protestar | protest | p | -
"""  # fmt: skip

# Spanish | English | of what: p people, f family, a animals, i ideas and media, o objects,
# l places, v vehicles, e food, d drink, x fruit | s: with ser, e: with estar.
ADJECTIVES = """
grande | big | oalvx | s
pequeño | small | oalvx | s
nuevo | new | oliv | s
bueno | good | peifvdx | s
alto | tall | pf | s
viejo | old | polav | s
joven | young | pfa | s
cansado | tired | pfa | e
inteligente | intelligent | pfa | s
enfermo | sick | pfa | e
contento | happy | pf | e
triste | sad | pf | e
rojo | red | ovx | s
blanco | white | oav | s
negro | black | oav | s
azul | blue | ov | s
verde | green | ovx | s
caro | expensive | ov | s
barato | cheap | ov | s
bonito | pretty | ol | s
feo | ugly | olav | s
difícil | difficult | i | s
fácil | easy | i | s
importante | important | ip | s
interesante | interesting | i | s
largo | long | i | s
corto | short | i | s
amable | kind | pf | s
simpático | nice | pf | s
fuerte | strong | pfa | s
rico | rich | p | s
pobre | poor | p | s
famoso | famous | pl | s
sucio | dirty | olv | e
limpio | clean | olv | e
roto | broken | ov | e
vacío | empty | l | e
cerrado | closed | l | e
abierto | open | l | e
ocupado | busy | pf | e
enojado | angry | pf | e
preocupado | worried | pf | e
nervioso | nervous | pf | e
perdido | lost | pfo | e
solo | alone | pfa | e
dormido | asleep | pfa | e
despierto | awake | pfa | e
aburrido | bored | pf | e
aburrido | boring | i | s
listo | ready | pf | e
listo | clever | pfa | s
caliente | hot | ed | e
frío | cold | ed | e
dulce | sweet | edx | s
fresco | fresh | ex | e
delicioso | delicious | edx | e
peligroso | dangerous | ial | s
útil | useful | oi | s
inútil | useless | oi | s
moderno | modern | olv | s
antiguo | ancient | l | s
tranquilo | quiet | l | s
tranquilo | calm | pfa | e
ruidoso | noisy | lv | s
oscuro | dark | lo | s
pesado | heavy | ov | s
ligero | light | ov | s
tímido | shy | pfa | s
valiente | brave | pfa | s
perezoso | lazy | pfa | s
trabajador | hard-working | pf | s
honesto | honest | pf | s
guapo | good-looking | pf | s
generoso | generous | pf | s
egoísta | selfish | pf | s
educado | polite | pf | s
curioso | curious | pfa | s
paciente | patient | pf | s
orgulloso | proud | pf | e
feliz | happy | pf | s
delgado | thin | pfa | s
gordo | fat | pa | s
rubio | blond | pf | s
cruel | cruel | p | s
sabio | wise | pf | s
torpe | clumsy | pfa | s
astuto | cunning | pa | s
serio | serious | pf | s
gracioso | funny | pfi | s
extraño | strange | ipa | s
malo | bad | i | s
sorprendido | surprised | pf | e
herido | injured | pfa | e
asustado | scared | pfa | e
emocionado | excited | pf | e
celoso | jealous | pf | e
avergonzado | ashamed | pf | e
decepcionado | disappointed | pf | e
seguro | sure | pf | e
confundido | confused | pf | e
vivo | alive | pfa | e
muerto | dead | pfa | e
casado | married | pf | e
agotado | exhausted | pfa | e
enamorado | in love | pf | e
mojado | wet | pfao | e
seco | dry | o | e
hambriento | hungry | a | e
salado | salty | e | s
amargo | bitter | edx | s
picante | spicy | e | s
maduro | ripe | x | e
podrido | rotten | ex | e
crudo | raw | e | e
quemado | burnt | e | e
amarillo | yellow | ovx | s
gris | gray | oav | s
marrón | brown | oav | s
morado | purple | o | s
redondo | round | o | s
cuadrado | square | o | s
duro | hard | ox | s
blando | soft | oe | s
ancho | wide | l | s
estrecho | narrow | l | s
lejano | distant | l | s
hermoso | beautiful | olfa | s
necesario | necessary | i | s
imposible | impossible | i | s
secreto | secret | il | s
falso | false | i | s
complicado | complicated | i | s
sencillo | simple | i | s
grave | serious | i | s
increíble | incredible | i | s
absurdo | absurd | i | s
perfecto | perfect | i | s
terrible | terrible | i | s
excelente | excellent | ip | s
maravilloso | wonderful | il | s
justo | fair | ip | s
injusto | unfair | i | s
ridículo | ridiculous | i | s
razonable | reasonable | ip | s
misterioso | mysterious | ipl | s
salvaje | wild | a | s
rápido | fast | pav | s
lento | slow | pav | s
resistente | sturdy | ov | s
elegante | elegant | po | s
alegre | cheerful | pf | s
optimista | optimistic | pf | s
pesimista | pessimistic | pf | s
responsable | responsible | pf | s
puntual | punctual | pf | s
ambicioso | ambitious | pf | s
ignorante | ignorant | p | s
ingenuo | naive | pf | s
terco | stubborn | pfa | s
leal | loyal | pfa | s
español | Spanish | pov | s
francés | French | pov | s
inglés | English | po | s
alemán | German | pov | s
italiano | Italian | pov | s
japonés | Japanese | pov | s
mexicano | Mexican | po | s
argentino | Argentinian | p | s
chino | Chinese | po | s
portugués | Portuguese | p | s
ruso | Russian | po | s
"""  # fmt: skip

MALE_NAMES = """Juan Carlos Luis Pedro Miguel Antonio José Diego Pablo Javier Andrés Manuel
Tomás Jorge
Alberto Rafael Fernando Sergio Ramón Ricardo Daniel Mateo Raúl Felipe Ernesto Hugo Emilio Óscar
Ignacio
Julio Enrique Gonzalo Adrián Marcos Álvaro Iván Rodrigo Esteban Gabriel Nicolás""".split()
FEMALE_NAMES = """María Ana Carmen Laura Lucía Elena Isabel Marta Sofía Rosa Teresa Clara Paula
Julia
Cristina Beatriz Pilar Alicia Irene Silvia Raquel Inés Daniela Carla Valeria Emma Natalia Mónica
Sara
Victoria Claudia Lorena Olga Nuria Rocío Amelia Leonor Gloria Adela Camila""".split()

CITIES = """Madrid; Barcelona; Sevilla Seville; Londres London; París Paris; Roma Rome; Lisboa
Lisbon;
Berlín Berlin; Nueva_York New_York; Buenos_Aires; Ciudad_de_México Mexico_City; La_Habana Havana;
Valencia;
Bogotá Bogota; Lima; Moscú Moscow; Tokio Tokyo; Pekín Beijing; Viena Vienna; Ginebra Geneva;
Milán Milan;
Florencia Florence; Venecia Venice; Atenas Athens; Estambul Istanbul; El_Cairo Cairo; Praga Prague;
Varsovia Warsaw; Bruselas Brussels; Granada; Toledo; Bilbao; Nápoles Naples; Múnich
Munich""".split(";")
COUNTRIES = """España Spain; Francia France; Italia Italy; Alemania Germany; Inglaterra England;
México Mexico; Portugal; Japón Japan; China; Argentina; Brasil Brazil; Rusia Russia; Suecia Sweden;
Grecia Greece; Suiza Switzerland; Egipto Egypt; Turquía Turkey; Noruega Norway; Polonia Poland;
Chile;
Marruecos Morocco; Escocia Scotland; Irlanda Ireland; Hungría Hungary; Bélgica Belgium;
Corea Korea;
Dinamarca Denmark; Finlandia Finland; Canadá Canada; Austria""".split(";")
