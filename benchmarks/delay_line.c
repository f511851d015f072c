/* A line of given bandwidth and round trip between two network namespaces, in user space, for
 * kernels without netem:
 *     delay_line MBIT RTT_MS DEVICE NAMESPACE NAMESPACE
 * makes a TUN device in each namespace, prints "ready", and carries packets between them until it
 * is ended. A thread for each direction: a packet takes its bytes (Ethernet header included) of
 * the line when it is free, and comes out half a round trip later. A packet that would wait more
 * than 1 s for the line is dropped, as by a router.
 *
 * The devices offer segmentation offload, as network cards do: what TCP hands over at once comes as
 * one large packet and is delivered as one, counted as the packets that would be on the wire. A
 * wake-up for each of them would take processor time from the ranks, which a real line does not. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 1 << 13, PACKET = 1 << 17, ETHERNET = 14, SECOND = 1000000000 };

struct slot { long long due; int size; char data[PACKET]; };
struct direction { int from, to; struct slot *ring; };

static double bits_per_ns;
static long long delay_ns;

static void fail(const char *what) { perror(what); exit(1); }

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (long long)t.tv_sec * SECOND + t.tv_nsec;
}

static int open_tun(const char *namespace, const char *device) {
    char path[256];
    struct ifreq request = {0};
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int home = open(path, O_RDONLY | O_CLOEXEC);
    if (home < 0 || setns(home, CLONE_NEWNET)) fail(path);
    close(home);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tun < 0) fail("/dev/net/tun");
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    if (ioctl(tun, TUNSETIFF, &request)) fail(device);
    if (ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("offload");
    return tun;
}

/* Bytes on the wire of an IPv4 packet as read: a header before each segment. */
static int wire_bytes(const char *data, int size) {
    const struct virtio_net_hdr *about = (const void *)data;
    const unsigned char *ip = (const unsigned char *)(about + 1);
    int packet = size - (int)sizeof *about, segments = 1, header = 0;
    if (about->gso_type != VIRTIO_NET_HDR_GSO_NONE && about->gso_size > 0) {
        int ip_header = 4 * (ip[0] & 15);
        header = ip_header + 4 * (ip[ip_header + 12] >> 4);
        segments = (packet - header + about->gso_size - 1) / about->gso_size;
    }
    return packet + (segments - 1) * header + segments * ETHERNET;
}

static void *carry(void *argument) {
    struct direction *line = argument;
    unsigned first = 0, end = 0; /* of the packets under way, modulo SLOTS */
    long long free_at = 0;
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) {
        long long now = now_ns();
        for (; first != end && line->ring[first % SLOTS].due <= now; first++) {
            struct slot *packet = &line->ring[first % SLOTS];
            if (write(line->to, packet->data, packet->size) < 0 && errno != EAGAIN
                && errno != EIO) /* EIO: the device is not up yet */
                fail("write");
        }
        struct slot *next = &line->ring[end % SLOTS];
        int size = end - first < SLOTS ? read(line->from, next->data, PACKET) : -1;
        if (size > 0) {
            now = now_ns();
            long long start = free_at > now ? free_at : now;
            if (start - now > SECOND) continue;
            free_at = start + (bits_per_ns > 0 ? 8 * wire_bytes(next->data, size) / bits_per_ns : 0);
            next->size = size;
            next->due = free_at + delay_ns;
            end++;
            continue; /* read all there is before sleeping */
        }
        long long sleep_ns = first == end ? SECOND : line->ring[first % SLOTS].due - now_ns();
        if (sleep_ns <= 0) continue;
        struct pollfd wait = {line->from, end - first < SLOTS ? POLLIN : 0, 0};
        struct timespec until = {sleep_ns / SECOND, sleep_ns % SECOND};
        ppoll(&wait, 1, &until, NULL);
    }
    return NULL;
}

int main(int count, char **values) {
    if (count != 6) {
        fprintf(stderr, "usage: delay_line MBIT RTT_MS DEVICE NAMESPACE NAMESPACE; 0 = no limit\n");
        return 2;
    }
    bits_per_ns = atof(values[1]) * 1e-3;
    delay_ns = atof(values[2]) * 0.5e6;
    int tun[2] = {open_tun(values[4], values[3]), open_tun(values[5], values[3])};
    /* A line does not wait for a busy processor. */
    struct sched_param first_of_all = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_FIFO, &first_of_all)) perror("no real-time priority");
    for (int i = 0; i < 2; i++) {
        struct direction *line = malloc(sizeof *line);
        struct slot *ring = calloc(SLOTS, sizeof *ring);
        pthread_t thread;
        if (!line || !ring) fail("memory");
        *line = (struct direction){tun[i], tun[1 - i], ring};
        if (pthread_create(&thread, NULL, carry, line)) fail("thread");
    }
    puts("ready");
    fflush(stdout);
    for (;;) pause();
}
