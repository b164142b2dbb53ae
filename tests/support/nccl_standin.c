/* What a communicator of NCCL has on the host: two service threads, which its end waits for, and an initialisation that
 * waits for a peer. The system calls and their arguments are those of NCCL 2.28.9 (src/proxy.cc, src/bootstrap.cc,
 * src/misc/socket.cc, src/misc/ipcsocket.cc), and nothing else is.
 *
 *     cc -O1 -shared -fPIC -pthread nccl_standin.c -o nccl_standin.so [-DUSE_PPOLL]
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS = 65, PERIOD_MS = 500 };

typedef struct {
    int listening, datagrams;
    int own, own_peer;     /* this rank's connection to its service thread, and the other end of it */
    int other, other_peer; /* the same of another rank of the host, or -1; that one closes nothing */
    volatile unsigned abort, stop;
    volatile long end_began; /* milliseconds; 0: it goes on */
    int sat_out;  /* polls that ended by their time, and of whose time the end has waited for half or more */
    int accepted; /* connections of strangers */
    int messages; /* datagrams that were looked at */
    pthread_t service, service_datagrams;
} Comm;

static int listen_on_loopback(int blocks, struct sockaddr_in *address) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t size = sizeof *address;
    memset(address, 0, size);
    address->sin_family = AF_INET;
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bind(fd, (struct sockaddr *)address, size);
    getsockname(fd, (struct sockaddr *)address, &size);
    if (!blocks) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    listen(fd, 16384);
    return fd;
}

static long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void wait_in_poll(Comm *comm, struct pollfd *polled, int count) {
    int ready;
    do {
#ifdef USE_PPOLL
        struct timespec period = {0, PERIOD_MS * 1000000L};
        ready = ppoll(polled, count, &period, NULL);
#else
        ready = poll(polled, count, PERIOD_MS);
#endif
    } while (ready < 0 && errno == EINTR);
    if (ready == 0 && comm->end_began && now_ms() - comm->end_began >= PERIOD_MS / 2)
        __sync_fetch_and_add(&comm->sat_out, 1);
}

static void *service(void *argument) {
    Comm *comm = argument;
    struct pollfd polled[CONNECTIONS + 1];
    int connections = comm->other < 0 ? 1 : 2, running = 1;
    for (int i = 0; i <= CONNECTIONS; i++) polled[i] = (struct pollfd){.fd = -1, .events = POLLHUP | POLLIN};
    polled[0].fd = comm->own_peer;
    polled[1].fd = comm->other_peer;
    polled[CONNECTIONS] = (struct pollfd){.fd = comm->listening, .events = POLLIN};
    while (running || connections) {
        if (comm->abort) running = 0;
        wait_in_poll(comm, polled, CONNECTIONS + 1);
        if (polled[CONNECTIONS].revents) {
            char first[8];
            int fd = accept(comm->listening, NULL, NULL);
            comm->accepted++;
            /* it waits for the first bytes; if the other end closes it waits for another connection instead */
            while (!comm->abort && !comm->stop) {
                ssize_t got = fd < 0 ? -1 : recv(fd, first, 8, MSG_DONTWAIT);
                if (got == 8) break;
                if (got >= 0) {
                    close(fd);
                    fd = -1;
                }
                if (fd < 0) fd = accept(comm->listening, NULL, NULL);
            }
            if (fd >= 0) close(fd);
        }
        for (int i = 0; i < 2; i++)
            /* An aborting thread closes the others' connections once its communicator says stop, but only looks when it
             * is awake; and what wakes it, the end of its own connection, comes before that word. A destroy has its say
             * by that connection. */
            if (polled[i].fd >= 0 && (polled[i].revents || (!running && comm->stop))) {
                if (i == 0 && !comm->abort) running = 0, connections = 1;
                close(polled[i].fd);
                polled[i].fd = -1;
                connections--;
            }
    }
    close(comm->listening);
    return NULL;
}

static void *service_datagrams(void *argument) {
    Comm *comm = argument;
    struct pollfd polled = {.fd = comm->datagrams, .events = POLLIN | POLLHUP};
    for (;;) {
        char message[256];
        wait_in_poll(comm, &polled, 1);
        if (comm->stop || comm->abort) break;
        if (!polled.revents) continue;
        comm->messages++;
        errno = EAGAIN; /* of an earlier try: what an empty message is taken for */
        while (recv(comm->datagrams, message, sizeof message, 0) <= 0)
            if ((errno != EAGAIN && errno != EINTR) || comm->abort) break;
    }
    close(comm->datagrams);
    return NULL;
}

static int connect_to(struct sockaddr_in *address, int listening, int *accepted) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    connect(fd, (struct sockaddr *)address, sizeof *address);
    while ((*accepted = accept(listening, NULL, NULL)) < 0) {}
    return fd;
}

Comm *comm_init(int rank, int beside_others) {
    Comm *comm = calloc(1, sizeof *comm);
    struct sockaddr_in address;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    comm->listening = listen_on_loopback(0, &address);
    comm->datagrams = socket(AF_UNIX, SOCK_DGRAM, 0);
    snprintf(name.sun_path, sizeof name.sun_path, "/tmp/nccl-socket-%d-%lx", rank, (unsigned long)(size_t)comm);
    name.sun_path[0] = 0;
    bind(comm->datagrams, (struct sockaddr *)&name, sizeof name);
    fcntl(comm->datagrams, F_SETFL, fcntl(comm->datagrams, F_GETFL) | O_NONBLOCK);
    comm->own = connect_to(&address, comm->listening, &comm->own_peer);
    comm->other = comm->other_peer = -1;
    if (beside_others) comm->other = connect_to(&address, comm->listening, &comm->other_peer);
    pthread_create(&comm->service, NULL, service, comm);
    pthread_create(&comm->service_datagrams, NULL, service_datagrams, comm);
    return comm;
}

static void join(Comm *comm) {
    pthread_join(comm->service, NULL);
    pthread_join(comm->service_datagrams, NULL);
    if (comm->other >= 0) close(comm->other);
}

/* device_ms: for how long the device goes on after the flag is set. */
void comm_abort(Comm *comm, int device_ms) {
    comm->end_began = now_ms();
    comm->abort = 1;
    usleep(device_ms * 1000);
    close(comm->own);
    if (comm->other >= 0) usleep(50); /* the service thread is quicker than the next line, as it may be */
    comm->stop = 1;
    join(comm);
}

void comm_destroy(Comm *comm, int device_ms) {
    usleep(device_ms * 1000);
    comm->end_began = now_ms();
    close(comm->own);
    comm->stop = 1;
    join(comm);
}

int comm_sat_out(Comm *comm) { return comm->sat_out; }
int comm_accepted(Comm *comm) { return comm->accepted; }
int comm_messages(Comm *comm) { return comm->messages; }
void comm_free(Comm *comm) { free(comm); }

/* The root, which waits in an accept that blocks. Says how it left: minus errno, or a descriptor. */
static void *root(void *argument) {
    int fd = *(int *)argument, got = accept(fd, NULL, NULL);
    *(int *)argument = got < 0 ? -errno : got;
    close(fd);
    return NULL;
}

/* A rank that waits for the root's answer, which does not come, in an accept that does not block; the first rank has the
 * root beside it. Returns the errno that ended it. */
int init_that_waits(int *root_left_with) {
    struct sockaddr_in address, root_address;
    int fd = listen_on_loopback(0, &address), got, ended;
    pthread_t thread;
    *root_left_with = listen_on_loopback(1, &root_address);
    pthread_create(&thread, NULL, root, root_left_with);
    do got = accept(fd, NULL, NULL);
    while (got < 0 && errno == EAGAIN);
    ended = got < 0 ? errno : 0;
    close(fd);
    pthread_join(thread, NULL);
    return ended;
}

/* A server that no thread waits on in poll: it listens at loopback. Returns its descriptor. */
int serve(void) {
    struct sockaddr_in address;
    return listen_on_loopback(1, &address);
}
