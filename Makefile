# For those who expect one; cargo does the work. `make install` puts the C library, its header, its pkg-config
# file and the program `deep-ep` below PREFIX.

PREFIX ?= /usr/local
DESTDIR ?=
BINDIR ?= $(PREFIX)/bin
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
CARGO ?= cargo
INSTALL ?= install
# `release`, or `dev` for what compiles faster.
PROFILE ?= release

TARGET := $(or $(CARGO_TARGET_DIR),target)
BUILT := $(TARGET)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' Cargo.toml)
# The SONAME, as build.rs of crates/deep-ep-capi has it.
SONAME := libdeep_ep.so.$(basename $(VERSION))
SHARED := libdeep_ep.so.$(VERSION)
LIB := $(DESTDIR)$(LIBDIR)
FILES := $(DESTDIR)$(BINDIR)/deep-ep $(DESTDIR)$(INCLUDEDIR)/deep_ep.h $(LIB)/libdeep_ep.a \
	$(LIB)/$(SHARED) $(LIB)/$(SONAME) $(LIB)/libdeep_ep.so $(LIB)/pkgconfig/deep_ep.pc

.PHONY: all install uninstall test clean

all:
	$(CARGO) build --locked --profile $(PROFILE) -p deep-ep-capi -p deep-ep-cli

install: all
	$(INSTALL) -d $(DESTDIR)$(BINDIR) $(DESTDIR)$(INCLUDEDIR) $(LIB)/pkgconfig
	$(INSTALL) -m 755 $(BUILT)/deep-ep $(DESTDIR)$(BINDIR)
	$(INSTALL) -m 644 crates/deep-ep-capi/include/deep_ep.h $(DESTDIR)$(INCLUDEDIR)
	$(INSTALL) -m 644 $(BUILT)/libdeep_ep_c.a $(LIB)/libdeep_ep.a
	$(INSTALL) -m 755 $(BUILT)/libdeep_ep_c.so $(LIB)/$(SHARED)
	ln -sf $(SHARED) $(LIB)/$(SONAME)
	ln -sf $(SONAME) $(LIB)/libdeep_ep.so
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' \
		-e 's|@VERSION@|$(VERSION)|' crates/deep-ep-capi/deep_ep.pc.in > $(LIB)/pkgconfig/deep_ep.pc

uninstall:
	rm -f $(FILES)

test:
	$(CARGO) xtask test

clean:
	$(CARGO) clean
