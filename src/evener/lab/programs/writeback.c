/* Record what is durable of a lab host's home, so that a power loss can take back the rest.

   As a library that /etc/ld.so.preload loads into every program of the host, it records at fsync and fdatasync the
   content of a file or the names in a folder, and at sync and syncfs all of the home. As a program (-DPROGRAM) it records
   all of the home once, and with an argument again every so many seconds: the kernel's writeback.

   A record is a file STORE/KEY: the content of a file, or for a folder "KEY\0NAME\0" for each of its names; of a
   symbolic link the key is "@TARGET". A key is d or f (folder or file), inode number and birth time, because inode
   numbers are used again.
   Not recorded: O_SYNC, msync, and programs without this library (static ones).

   Compile with -DHOME and -DSTORE as string literals. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { KEY_BYTES = 64, LINK_BYTES = 4097, COPY_BYTES = 1 << 16 };

struct names { char *keys; size_t used, size; };  /* keys that a walk has met, each ended by a newline */

static int lock_store(void) {
    int lock = open(STORE "/lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock >= 0) flock(lock, LOCK_EX);
    return lock;
}

static void unlock_store(int lock) {
    flock(lock, LOCK_UN);  /* not by close alone: another thread may have forked */
    close(lock);
}

/* Write the key of a file or folder; "@TARGET" of a symbolic link; return its statx, or -1 for anything else. */
static int key_of(int folder, const char *name, int flags, struct statx *status, char *key) {
    if (statx(folder, name, flags | AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_BTIME, status) != 0) return -1;
    if (S_ISLNK(status->stx_mode)) {
        ssize_t size = readlinkat(folder, name, key + 1, LINK_BYTES - 2);
        if (size < 0) return -1;
        key[0] = '@', key[1 + size] = 0;
        return 0;
    }
    if (!S_ISREG(status->stx_mode) && !S_ISDIR(status->stx_mode)) return -1;
    snprintf(key, KEY_BYTES, "%c%llu-%lld.%09u", S_ISDIR(status->stx_mode) ? 'd' : 'f',
             (unsigned long long)status->stx_ino, (long long)status->stx_btime.tv_sec, status->stx_btime.tv_nsec);
    return 0;
}

static void publish(const char *key, int record, const struct statx *status) {
    char path[sizeof STORE + KEY_BYTES + 1];
    struct timespec times[2] = {{0, UTIME_OMIT}, {status->stx_mtime.tv_sec, status->stx_mtime.tv_nsec}};
    snprintf(path, sizeof path, STORE "/%s", key);
    fchmod(record, (status->stx_mode & 07777) | 0400);
    futimens(record, times);
    rename(STORE "/draft", path);
}

static void record_file(int file) {
    struct statx status;
    char key[LINK_BYTES], block[COPY_BYTES];
    int record = open(STORE "/draft", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ssize_t size;
    off_t offset = 0;
    if (record < 0) return;
    if (key_of(file, "", AT_EMPTY_PATH, &status, key) == 0) {
        while ((size = pread(file, block, sizeof block, offset)) > 0 && write(record, block, size) == size)
            offset += size;
        publish(key, record, &status);
    }
    close(record);
}

/* Record the names in a folder; `met` collects their keys. */
static void record_folder(int folder, struct names *met) {
    struct statx status, ignored;
    char key[LINK_BYTES], child[LINK_BYTES];
    int record = open(STORE "/draft", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    DIR *entries = fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    FILE *lines = record >= 0 ? fdopen(dup(record), "w") : NULL;
    struct dirent *entry;
    if (lines != NULL && entries != NULL && key_of(folder, "", AT_EMPTY_PATH, &status, key) == 0) {
        while ((entry = readdir(entries)) != NULL) {
            if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
            if (key_of(folder, entry->d_name, 0, &ignored, child) != 0) continue;
            fwrite(child, 1, strlen(child) + 1, lines);
            fwrite(entry->d_name, 1, strlen(entry->d_name) + 1, lines);
            if (met != NULL && child[0] != '@') {
                if (met->used + KEY_BYTES > met->size) met->keys = realloc(met->keys, met->size = 2 * met->size + 4096);
                met->used += (size_t)sprintf(met->keys + met->used, "%s\n", child);
            }
        }
        fflush(lines);
        publish(key, record, &status);
    }
    if (lines != NULL) fclose(lines);
    if (entries != NULL) closedir(entries);
    if (record >= 0) close(record);
}

/* A record is up to date if size and time agree, and the time is too old for another write within its resolution. */
static int is_recorded(int folder, const char *name) {
    struct statx now;
    struct stat before;
    struct timespec clock;
    char key[LINK_BYTES], path[sizeof STORE + KEY_BYTES + 1];
    if (key_of(folder, name, 0, &now, key) != 0) return 1;
    snprintf(path, sizeof path, STORE "/%s", key);
    clock_gettime(CLOCK_REALTIME, &clock);
    return stat(path, &before) == 0 && before.st_size == (off_t)now.stx_size && clock.tv_sec > now.stx_mtime.tv_sec + 1 &&
           before.st_mtim.tv_sec == now.stx_mtime.tv_sec && before.st_mtim.tv_nsec == (long)now.stx_mtime.tv_nsec;
}

static void record_tree(int folder, struct names *met) {
    DIR *entries;
    struct dirent *entry;
    int lock = lock_store();
    record_folder(folder, met);
    unlock_store(lock);
    entries = fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    while (entries != NULL && (entry = readdir(entries)) != NULL) {
        struct stat status;
        int child;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (fstatat(folder, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (!S_ISDIR(status.st_mode) && (!S_ISREG(status.st_mode) || is_recorded(folder, entry->d_name))) continue;
        child = openat(folder, entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (child < 0) continue;
        if (S_ISDIR(status.st_mode)) {
            record_tree(child, met);
        } else {
            lock = lock_store();
            record_file(child);
            unlock_store(lock);
        }
        close(child);
    }
    if (entries != NULL) closedir(entries);
}

/* Remove the records that no name needs: of files that are gone since before the walk. */
static void forget_removed(const struct names *met, const struct timespec *since) {
    DIR *records = opendir(STORE);
    struct dirent *entry;
    while (records != NULL && (entry = readdir(records)) != NULL) {
        struct stat status;
        char line[KEY_BYTES + 2];
        if (strchr(entry->d_name, '-') == NULL || strlen(entry->d_name) >= KEY_BYTES) continue;
        snprintf(line, sizeof line, "%s\n", entry->d_name);
        if (met->keys != NULL && strstr(met->keys, line) != NULL) continue;
        if (fstatat(dirfd(records), entry->d_name, &status, 0) == 0 && status.st_ctim.tv_sec + 1 < since->tv_sec)
            unlinkat(dirfd(records), entry->d_name, 0);
    }
    if (records != NULL) closedir(records);
}

static void record_home(void) {
    struct names met = {NULL, 0, 0};
    struct timespec since;
    struct statx status;
    char key[LINK_BYTES];
    int home = open(HOME, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (home < 0) return;
    clock_gettime(CLOCK_REALTIME, &since);
    met.keys = calloc(1, met.size = 4096);
    if (key_of(home, "", AT_EMPTY_PATH, &status, key) == 0) met.used += (size_t)sprintf(met.keys, "%s\n", key);
    record_tree(home, &met);
    forget_removed(&met, &since);
    free(met.keys);
    close(home);
}

#ifdef PROGRAM

int main(int argc, char **argv) {
    for (;;) {
        record_home();
        if (argc < 2) return 0;
        usleep((useconds_t)(atof(argv[1]) * 1e6));
    }
}

#else

/* Record a file or folder of the home that has just been flushed; leave errno as it is. */
static void record(int descriptor) {
    char link[32], path[LINK_BYTES];
    struct stat status;
    ssize_t size;
    int before = errno, file, lock;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    if (strncmp(path, HOME, sizeof HOME - 1) == 0 && (path[sizeof HOME - 1] == '/' || path[sizeof HOME - 1] == 0) &&
        fstat(descriptor, &status) == 0 && status.st_nlink > 0) {
        file = open(link, O_RDONLY | O_CLOEXEC);  /* it may be open for writing alone */
        lock = lock_store();
        if (S_ISDIR(status.st_mode)) record_folder(file, NULL);
        if (S_ISREG(status.st_mode)) record_file(file);
        unlock_store(lock);
        close(file);
    }
    errno = before;
}

#define REAL(name) ((int (*)(int))dlsym(RTLD_NEXT, #name))

int fsync(int descriptor) {
    int result = REAL(fsync)(descriptor);
    if (result == 0) record(descriptor);
    return result;
}

int fdatasync(int descriptor) {
    int result = REAL(fdatasync)(descriptor);
    if (result == 0) record(descriptor);
    return result;
}

int syncfs(int descriptor) {
    int result = REAL(syncfs)(descriptor);
    if (result == 0) record_home();
    return result;
}

void sync(void) {
    ((void (*)(void))dlsym(RTLD_NEXT, "sync"))();
    record_home();
}

#endif
