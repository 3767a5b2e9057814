# An image for the syncer (any machine) and for islands on TPU hosts: docker build -t NAME . && docker push NAME
# Python 3.11 and constraints-py311.txt, so that it holds the versions that the tests ran with.
FROM python:3.11-slim

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1

WORKDIR /opt/diloco
COPY constraints-py311.txt ./
# By far the largest layer, and the one that changes least. JAX=jax makes a small image for the syncer alone.
ARG JAX="jax[tpu]"
RUN pip install -c constraints-py311.txt "$JAX"

# EXTRAS=gs,pathways makes an image for `diloco launch pathways`.
ARG EXTRAS=gs
# The other dependencies, before the sources, whose changes must not install them anew. `diloco launch` makes
# certificates for every run, so all images have tls.
COPY pyproject.toml LICENSE README.md ./
RUN mkdir configs diloco_jax && touch diloco_jax/__init__.py \
    && pip install -c constraints-py311.txt ".[tls,$EXTRAS]" \
    && pip uninstall --yes diloco-jax

COPY configs ./configs
COPY diloco_jax ./diloco_jax
RUN pip install --no-deps .

# Islands run as root where the platform gives TPU devices to root alone; launch says so. Everything else need not.
RUN useradd --uid 10001 --create-home diloco && install -d -o diloco -g diloco /var/diloco
USER 10001
WORKDIR /home/diloco
ENTRYPOINT ["diloco"]
CMD ["--help"]
